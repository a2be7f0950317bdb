"""The card of a model made by relufy as readable text."""

from __future__ import annotations

from typing import Any

SCHEMA = 1


def markdown(card: dict[str, Any]) -> str:
    """CARD.md: what was done to which model, on what text, and how good it was before and after."""
    model, spec, training = card["model"], card["request"]["spec"], card["training"]
    control = (
        f"its weight controlled to bring the active neurons to {spec['active']:.1%} at {spec['reach']:.0%} of the run"
        if spec["schedule"] == "progressive"
        else f"its weight rising linearly to {spec['penalty_weight']:g}"
    )
    shift = f", shifted by {spec['shift']:g} (folded into the bias)" if spec["shift"] else ""
    lines = [
        f"# {model['name']} with ReLU",
        "",
        f"A {model['model_type']} model ({model['num_layers']} layers, d_model {model['d_model']}, d_ff "
        f"{model['d_ff']}) whose {model['activation']} was replaced by ReLU{shift}, re-trained by distillation from "
        f"the original (digest {model['digest'][:16]}) with `workbench relufy`.",
        "",
        f"- Training: {training['steps']} steps of {training['batch_tokens']} tokens, {training['tokens'] / 1e6:.1f}M "
        f"tokens seen, {training['seconds']:.0f} s on {card['device']}; {training['trained_parameters'] / 1e6:.1f}M "
        f"parameters moved ({spec['train']}). AdamW, peak {spec['learning_rate']:g}, cosine.",
        f"- Loss: {spec['kl_weight']:g} x KL from the original, {spec['ce_weight']:g} x cross-entropy, "
        f"{spec['layer_match']:g} x distance of hidden states; {spec['penalty']} penalty, {control} (last weight "
        f"{training['penalty_weight']:.3g}).",
        *_texts(card["data"]),
        _thresholds(card["fatrelu"], spec),
        "",
        "| text | model | perplexity | zeros in the activation's output |",
        "| --- | --- | --- | --- |",
    ]
    for text, found in card["measured"].items():
        windows = card["windows"][text]
        for stage in ("before", "swapped", "after"):
            if stage in found:
                lines.append(
                    f"| {text} ({windows['windows']} windows of {windows['length']}) | {_STAGES[stage]} | "
                    f"{found[stage]['perplexity']:.2f} | {found[stage]['zeros']:.1%} |"
                )
    first = next(iter(card["measured"].values()))
    lines += ["", "| layer | zeros before | swapped | after | threshold |", "| --- | --- | --- | --- | --- |"]
    for layer, threshold in enumerate(card["fatrelu"]["thresholds"] or [0.0] * model["num_layers"]):
        before, swapped, after = (first[s]["zeros_by_layer"][layer] for s in ("before", "swapped", "after"))
        lines.append(f"| {layer} | {before:.1%} | {swapped:.1%} | {after:.1%} | {threshold:.4g} |")
    lines += ["", "| step | KL | active | penalty's weight |", "| --- | --- | --- | --- |"]
    curve = training["curve"]
    every = max(1, len(curve["step"]) // 20)
    for i in range(0, len(curve["step"]), every):
        lines.append(
            f"| {curve['step'][i]} | {curve['kl'][i]:.4f} | {curve['active'][i]:.1%} | {curve['penalty'][i]:.3g} |"
        )
    return "\n".join(lines) + "\n"


_STAGES = {"before": "original", "swapped": "ReLU, not re-trained", "after": "this model"}


def _texts(data: list[dict[str, Any]]) -> list[str]:
    return [
        f"- Text: {entry['source']} (weight {entry['weight']:g}): {entry['documents']} documents, {entry['tokens']} "
        f"tokens read in the first round, {entry['rounds']} rounds begun, SHA-256 chain {entry['sha256'][:16]}."
        for entry in data
    ]


def _thresholds(found: dict[str, Any], spec: dict[str, Any]) -> str:
    if not any(found["thresholds"]):
        return "- No FATReLU thresholds: an activation is active above 0."
    share = f"{100 * found['share']:.2g}%"
    return (
        f"- FATReLU: an activation counts above its layer's threshold. The thresholds take away {share} of the energy "
        f"that flows into each FFN's output, the most that keeps perplexity within "
        f"{spec['fatrelu_tolerance']:.2%} on text that they are not measured on."
    )
