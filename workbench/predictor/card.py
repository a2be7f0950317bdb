"""The card of trained predictors: what was trained, on what text, how good it is; as JSON and as readable text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.training.versions import versions

if TYPE_CHECKING:
    from workbench.predictor.low_rank import LayerPredictor
    from workbench.predictor.metrics import Counts
    from workbench.predictor.trainer import Trainer

SCHEMA = 1


def make_card(
    trainer: Trainer,
    layers: list[LayerPredictor],
    limits: list[list[float]],
    counts: list[list[Counts]],
    rates: list[float],
    request: dict[str, Any],
    data: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """card.json, but for times. `limits` and `counts`: each layer's thresholds, and what they gave, by rate."""
    spec, geometry = trainer.spec, trainer.geometry
    ffn = geometry.parts * geometry.d_ff * geometry.d_model
    chosen = rates.index(spec.false_negative)
    factors = sum(layer.a.size + layer.b.size + layer.bias.size for layer in layers)
    return {
        "schema": SCHEMA,
        "model": {
            "name": name,
            "num_layers": len(layers),
            "d_model": geometry.d_model,
            "d_ff": geometry.d_ff,
            "parts": geometry.parts,
        },
        "model_digest": request["model_digest"],
        "input": spec.input,
        "spec": request["spec"],
        "request": request,
        "data": {**data, "rounds": trainer.stream.round + 1},
        "seed": spec.seed,
        "versions": versions(),
        "store_dtype": spec.store_dtype,
        "nbytes": sum(layer.nbytes for layer in layers),
        "weight_share": factors / (ffn * len(layers)),
        "tokens_trained": trainer.steps * trainer.batch_tokens,
        "tokens_statistics": trainer.init_batches * trainer.batch_tokens,
        "steps": trainer.steps,
        "batch_tokens": trainer.batch_tokens,
        "allocation": trainer.allocation,
        "loss_curve": trainer.curve,
        "layers": [
            {
                "rank": layer.rank,
                "threshold": layer.threshold,
                **counts[n][chosen].as_dict(),
                "weight_share": (layer.a.size + layer.b.size) / ffn,
                "frontier": [
                    {"target": rate, "threshold": limits[n][i], **counts[n][i].as_dict()}
                    for i, rate in enumerate(rates)
                ],
            }
            for n, layer in enumerate(layers)
        ],
    }


def markdown(card: dict[str, Any]) -> str:
    """CARD.md: what was trained, on what text, and how good each layer is."""
    model, spec, data = card["model"], card["spec"], card["data"]
    time, source = card.get("measured", {}), card.get("input", "ffn")
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
    if source != "ffn":
        lines.append(f"- Input: {source}, for comparison; no engine takes these.")
    if card.get("allocation"):
        lines.append(
            f"- Ranks: by what each layer gains, within {card['allocation']['rank_bytes'] / 1e6:.2f} MB of factors."
        )
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
