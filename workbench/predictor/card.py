"""The card of trained predictors as readable text."""

from __future__ import annotations

from typing import Any

SCHEMA = 1


def markdown(card: dict[str, Any]) -> str:
    """CARD.md: what was trained, on what text, and how good each layer is."""
    model, spec, data = card["model"], card["spec"], card["data"]
    time = card.get("measured", {})
    lines = [
        f"# Predictors for {model['name']}",
        "",
        f"Low-rank predictors of which feed-forward neurons fire: {model['num_layers']} layers, "
        f"d_model {model['d_model']}, d_ff {model['d_ff']}; model fingerprint {card['model_digest'][:16]}.",
        "",
        f"- Text: {data['train']['source']}, {data['train']['documents']} documents, {data['train']['tokens']} tokens "
        f"read ({card['tokens_trained']} trained on, {data['rounds']} rounds begun), "
        f"SHA-256 chain {data['train']['sha256'][:16]}.",
        f"- Validation: {spec['validation_share']:.0%} of the documents by hash, never trained on; thresholds from "
        f"{data['calibrate']['tokens']} tokens, figures below from {data['test']['tokens']} others.",
        f"- Training: {spec['loss']} loss, {spec['init']} initialisation, AdamW {spec['learning_rate']:g} cosine, "
        f"{card['steps']} steps of {card['batch_tokens']} tokens, seed {spec['seed']}. "
        f"Loss {_ends(card['loss_curve'])}.",
        f"- Factors stored as {card['store_dtype']}, {card['nbytes'] / 1e6:.2f} MB; "
        f"{card['weight_share']:.1%} of the FFN's weights.",
    ]
    if time:
        lines.append(
            f"- Time: {time['predictor_us']:.0f} us a token for all layers beside {time['ffn_us']:.0f} us for the "
            f"dense FFN ({time['share']:.1%}); {time['how']}."
        )
    lines += [
        "",
        "| layer | rank | active | predicted | pred./active | false negative | false positive | activation missed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for n, layer in enumerate(card["layers"]):
        lines.append(
            f"| {n} | {layer['rank']} | {layer['active']:.1f} | {layer['predicted']:.1f} | "
            f"{layer['predicted_over_active']:.2f} | {layer['false_negative']:.2%} | {layer['false_positive']:.2%} | "
            f"{layer['missed_activation']:.2%} |"
        )
    lines += ["", "Active and predicted are neurons a token (means). Other thresholds (predicted/active):", ""]
    lines += _frontier(card["layers"])
    return "\n".join(lines) + "\n"


def _ends(curve: dict[str, Any]) -> str:
    mean = [sum(row) / len(row) for row in curve["loss"]]
    return f"{mean[0]:.4f} at step {curve['step'][0]}, {mean[-1]:.4f} at step {curve['step'][-1]}" if mean else "none"


def _frontier(layers: list[dict[str, Any]]) -> list[str]:
    targets = [point["target"] for point in layers[0]["frontier"]]
    lines = [
        "| layer | " + " | ".join(f"{target:.0%} missed" for target in targets) + " |",
        "| --- |" + " --- |" * len(targets),
    ]
    for n, layer in enumerate(layers):
        lines.append(f"| {n} | " + " | ".join(f"{p['predicted_over_active']:.2f}" for p in layer["frontier"]) + " |")
    return lines
