"""The paper's tables and figures, drawn from records: the right numbers in the right cells. Numbers of no machine."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_report_analysis import coactivation_record, sparsity_record, window_record
from test_report_analysis import record as any_record
from test_report_evaluation import MACHINE as EVALUATION_MACHINE
from test_report_evaluation import RUN as EVALUATION_RUN
from test_report_evaluation import row as evaluation_row
from test_report_records import ablation_record, flash_record, predictor_card, reuse_record

from workbench.errors import RecordError
from workbench.report import style
from workbench.report import tables as package
from workbench.report.paper import paper
from workbench.report.table import Table
from workbench.report.tables import ENTRIES, Drawn, draw, stored_tables, tables
from workbench.report.tables.figure8 import read_long_run, running_median
from workbench.report.tables.registry import gather, name_of
from workbench.report.tables.rows import read_rows
from workbench.report.tables.table3 import counterpart

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "<script>alert(1)</script> | ![x](javascript:1) `rm`"


def evaluation_record(*tasks: str, text: bool = True) -> dict[str, Any]:
    cards = [
        {
            "name": name, "source": f"{name}.jsonl", "split": "test", "sha256": "ab" * 32, "version": "1.0",
            "subjects": 1, "documents": 20, "requests": 80,
        }
        for name in tasks
    ]  # fmt: skip
    rows = [
        evaluation_row("dense", "off", None, 10.0, 0.0, 2.0e6, 0.61),
        evaluation_row("oracle", "oracle", 0.0, 10.0, 0.0, 1.0e5, 0.61),
        evaluation_row("predicted, 5% missed", "low_rank", 0.05, 10.4, 0.048, 2.0e5, 0.58),
    ]
    for one in rows:
        result = one["tasks"]["arc_easy"]
        one["tasks"] = {name: copy.deepcopy(result) for name in tasks}
        if not text:
            one |= dict.fromkeys(set(one) - {"name", "predictor", "rate", "ablation", "tasks"})
    card = {"source": "c4.json.gz", "documents": 9, "tokens": 4096, "sha256": "cd" * 32} if text else None
    return {
        "schema": 1, "kind": "evaluation", "machine": EVALUATION_MACHINE, "run": dict(EVALUATION_RUN),
        "settings": {"sequence": 512, "prompt": 64}, "data": card, "tasks": cards, "harness": "0.4.13",
        "ffn_neurons": 512, "rows": rows,
    }  # fmt: skip


def long_run_record(tokens: int = 120) -> dict[str, Any]:
    io = [9.0] * 8 + [3.0 + 0.2 * (i % 3) for i in range(tokens - 8)]
    row: dict[str, Any] = {"name": "greedy", "temperature": 0.0, "top_p": 1.0, "first_token_ms": 310.0}
    row |= {"first_token_bytes": 9e6, "io_ms": io, "total_ms": [v + 4 for v in io], "flash_bytes": [2e6] * tokens}
    row |= {"rss": [{"token": 0, "rss_bytes": 50_000_000}, {"token": 50, "rss_bytes": 51_000_000}]}
    row |= {"io_drift": 1.0, "flash_bytes_per_s": 1e9}
    bare = {k: v for k, v in row.items() if k not in ("rss", "first_token_ms", "first_token_bytes")}
    nucleus = bare | {"name": "nucleus", "temperature": 0.8, "top_p": 0.95, "flash_bytes_per_s": None}
    return any_record("long_run", rows=[row, nucleus], warm_up=8, stretch=200, prompt_tokens=64)


def dram_record() -> dict[str, Any]:
    parts = {"predictor_bytes": 2, "embedding_bytes": 5, "attention_bytes": 30, "slots_bytes": 10}
    parts |= {"kv_bytes": 2, "scratch_bytes": 1}
    return any_record(
        "dram", model_bytes=100_000_000, budget_bytes=50_000_000, parts={k: v * 10**6 for k, v in parts.items()}
    )


def texts_record() -> dict[str, Any]:
    one = {"tokens": [5, 6, 7], "pieces": [" a", " b", " c"], "flash_bytes": 2e6, "tokens_per_s": 9.0}
    other = {"tokens": [5, 8, 7], "pieces": [" a", " x", " c"], "flash_bytes": 1e5, "tokens_per_s": 30.0}
    pairs = [
        {"prompt": "Once", "dense": one, "predicted": other, "diverges_at": 1},
        {"prompt": "Then", "dense": one, "predicted": one, "diverges_at": None},
    ]
    return any_record("side_by_side", rate=0.05, pairs=pairs)


def all_parts() -> dict[str, Any]:
    return {
        "ablation": ablation_record(),
        "flash": flash_record(),
        "reuse": reuse_record(),
        "sparsity": sparsity_record(),
        "predictors": predictor_card(),
        "window": window_record(),
        "coactivation": coactivation_record(),
        "evaluation": evaluation_record(),
        "tasks": evaluation_record("arc_easy", "hellaswag", text=False),
        "mmlu": evaluation_record("mmlu", text=False),
        "long_run": long_run_record(),
        "side_by_side": texts_record(),
        "dram": dram_record(),
    }


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of few pixels: most of a test's time would be theirs."""
    fine = style.png
    monkeypatch.setattr(style, "png", lambda figure, dpi=0: fine(figure, 40))


def cells(table: Table) -> dict[str, dict[str, str]]:
    """Cells by column, by label."""
    return {line.label: dict(line.cells) for line in table.lines()}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_table_is_drawn_and_written(name: str, tmp_path: Path) -> None:
    parts, own = all_parts(), ENTRIES[name]
    found = tables(name, records=[parts[part] for part in (*own.needs, *own.uses)], out=tmp_path)
    (drawn,) = found
    assert isinstance(drawn, Drawn)
    assert found[name] is found[0] is drawn
    assert drawn.headline.endswith(".")
    assert all(picture.png.startswith(PNG) for picture in drawn.pictures)
    assert bool(drawn.pictures) == (name in {"table3", "table4", "appendix_d"} or name.startswith("figure"))
    for table in drawn.tables:
        keys = {column.key for column in table.columns}
        assert all(set(line.cells) <= keys | {"per_j"} for line in table.lines())
    written = {path.name for path in found.paths}
    assert {f"{name}.html", f"{name}.md", f"{name}.json", "index.html", "index.md"} <= written
    assert (f"{name}.png" in written) == bool(drawn.pictures)
    text = (tmp_path / f"{name}.md").read_text()
    assert text.startswith(f"# {drawn.title}".replace("_", r"\_"))
    assert "Paper: " in text
    assert json.loads((tmp_path / f"{name}.json").read_text())["records"].keys() == {*own.needs, *own.uses}
    again = tables(name, records=[tmp_path / f"{name}.json"], out=tmp_path / "again")
    assert [other.name for other in again] == [name]
    assert (tmp_path / "again" / f"{name}.md").read_text() == text
    assert (tmp_path / "again" / f"{name}.html").read_text() == (tmp_path / f"{name}.html").read_text()


def test_table2_has_the_papers_figures_in_the_same_row() -> None:
    data = ablation_record()
    data["rows"][4] |= {"energy_j_per_token": 0.5, "energy_source": "RAPL package"}
    drawn = draw("table2", {"ablation": data})
    rows = cells(drawn.tables[0])
    naive, best, beyond = rows["naive"], rows["+ bundling (all)"], rows["all, merged reads"]
    assert (naive["flash"], naive["paper_flash"], naive["io"], naive["paper_io"]) == (
        "96.0 MB",
        "13.4 GB",
        "66.4",
        "2196",
    )
    assert (best["flash"], best["less"], best["paper_flash"], best["paper_less"]) == (
        "1.50 MB",
        "1/64",
        "0.2 GB",
        "1/67",
    )
    assert (best["io"], best["faster"], best["paper_io"], best["paper_faster"]) == ("1.84", "36×", "87", "25×")
    assert (best["speed"], best["paper_speed"]) == ("815 MB/s", "2.25 GB/s")
    assert (best["floor"], best["total"], best["over"]) == ("2.50", "4.07", "1.6×")
    assert (best["dram"], best["peak"], best["paper_dram"]) == ("48.0 MB", "50.4 MB", "6.5 GB")
    assert (best["energy"], best["per_j"], naive["energy"]) == ("0.5", "2", "not measured")
    assert (beyond["paper_io"], beyond["io"]) == ("–", "1.21")
    assert "Energy: RAPL package." in drawn.notes
    assert drawn.headline == (
        "All techniques read 1/64 of naive's flash bytes here and 1/67 in the paper, and make io 36× faster here and "
        "25× in the paper."
    )


def test_table3_prefetch_and_speculative_rows() -> None:
    data = ablation_record()
    spec, fetch = copy.deepcopy(data["rows"][4]), copy.deepcopy(data["rows"][4])
    spec |= {"name": "all + speculative", "acceptance": 0.62, "tokens_per_round": 3.48, "draft_ms": 0.7}
    spec |= {"total_ms": 2.0, "text": "own greedy continuation"}
    spec["ablation"]["speculative"] = True
    fetch |= {"name": "all + prefetch", "prefetched": 40.0, "wasted": 10.0, "wasted_bytes": 5e5, "hidden_io_ms": 1.25}
    fetch["ablation"]["prefetch"] = True
    data["rows"] += [spec, fetch]
    drawn = draw("table3", {"ablation": data})
    rows = cells(drawn.tables[0])
    assert list(rows)[:3] == ["naive", "hybrid", "+ bundling (all)"]
    assert "+ windowing" not in rows
    best = rows["+ bundling (all)"]
    assert (best["io_paper"], best["mem_paper"], best["compute_paper"], best["total_paper"]) == (
        "105",
        "58",
        "506",
        "669",
    )
    assert (best["total"], best["faster"], best["faster_paper"], best["share"]) == (
        "4.07",
        "17.7×",
        "4.8×",
        "5.7%",
    )
    assert (rows["hybrid"]["total_paper"], rows["all + speculative"]["total_paper"]) == ("–", "–")
    assert rows["all + prefetch"]["floor"] == "2.00"
    every = cells(drawn.tables[1])
    assert every["paper: OPT-6.7B, GPU (RTX)"]["best"] == "37×"
    assert every["paper: OPT-6.7B, CPU (M1 Max), beside it above"]["faster"] == "4.8×"
    assert (every["paper: Phi-2, CPU (M1 Max)"]["hybrid"], every["paper: Phi-2, CPU (M1 Max)"]["faster"]) == (
        "711",
        "2.4×",
    )
    assert (every["demo-opt, this machine"]["faster"], every["demo-opt, this machine"]["best"]) == ("17.7×", "36×")
    assert "speculative against all: 2.0× here, 1.4× in the paper" in drawn.headline
    notes = " ".join(drawn.notes)
    assert "62% of drafted tokens accepted, 3.5 tokens a round, the draft takes 0.7 ms a token" in notes
    assert (
        "all + prefetch: 40 neurons a token read ahead, 25% of them wasted, 500 kB a token wasted, 1.25 ms of io hidden"
        in notes
    )


@pytest.mark.parametrize(
    ("run", "device", "model"),
    [
        ({}, "CPU (M1 Max)", "OPT-6.7B"),
        ({"backend": "torch-cuda", "model": "opt-6.7b"}, "GPU (RTX)", "OPT-6.7B"),
        ({"backend": "mlx-metal"}, "Metal (M1)", "OPT-6.7B"),
        ({"model": "falcon-7b-relu"}, "CPU (M1 Max)", "Falcon-7B (ReLU)"),
        ({"backend": "torch-cuda", "model": "Llama-2-7b"}, "CPU (M1 Max)", "Llama 2 7B (FATReLU)"),
    ],
)
def test_table3_is_set_beside_the_nearest_of_the_paper(run: dict[str, str], device: str, model: str) -> None:
    found = counterpart(read_rows(ablation_record(**run)))
    assert (found.device, found.model) == (device, model)


def test_beyond_figures_are_checked() -> None:
    data = ablation_record()
    data["rows"][4]["acceptance"] = "much"
    with pytest.raises(RecordError, match=r"rows\[4\].acceptance is 'much', not a number"):
        draw("table3", {"ablation": data})


def test_the_record_is_not_changed_by_drawing() -> None:
    data = ablation_record()
    data["rows"][4] |= {"energy_j_per_token": 0.5, "wasted_bytes": None}
    before = copy.deepcopy(data)
    draw("table2", {"ablation": data})
    assert data == before


def test_the_papers_sentences_say_what_its_figures_say() -> None:
    known = {(e.model, e.device): e for e in paper().table3}
    gpu, cpu = known["OPT-6.7B", "GPU (RTX)"], known["OPT-6.7B", "CPU (M1 Max)"]
    rows = paper().all.cpu, paper().naive.cpu
    assert (cpu.rows["all"], cpu.rows["naive"]) == rows
    says = ENTRIES["table3"].says
    numbers = [float(n) for n in re.findall(r"(\d+(?:\.\d+)?)×", says)]
    families = [known[f, "CPU (M1 Max)"].faster() for f in list(paper().families)[1:]]
    expected = [cpu.faster(), gpu.faster(), gpu.faster("speculative"), 84 / 60, *families]
    assert numbers == [pytest.approx(value, rel=0.03) for value in expected]
    for name, own in ENTRIES.items():
        assert own.says.endswith("."), name
    for entry in paper().table3:
        for row in entry.rows.values():
            assert row["io_ms"] + row["mem_ms"] + row["compute_ms"] == pytest.approx(row["total_ms"], abs=1)
    assert sum(v for k, v in paper().dram.items() if k != "total") == pytest.approx(paper().dram["total"], abs=0.003)


def test_table1_accuracy_and_its_change() -> None:
    rows = cells(draw("table1", all_parts()).tables[0])
    assert rows["arc_easy"] == {
        "dense": "61.0 ± 1.2", "predicted": "58.0 ± 1.2", "change": "-3.0", "paper_dense": "66.1",
        "paper_predicted": "66.2", "paper_change": "+0.1", "documents": "20",
    }  # fmt: skip
    assert rows["hellaswag"]["paper_change"] == "-0.5"


def test_table4_has_every_family_and_the_share_of_time() -> None:
    parts = all_parts()
    rows = cells(draw("table4", parts).tables[0])
    assert rows["false negatives, of the active"]["OPT-6.7B"] == "5.0%"
    assert rows["false negatives, of the active"]["here"] == "4.1%"
    assert rows["predicted / active"] | {"here": ""} == {
        "here": "", "OPT-6.7B": "3.0×", "Falcon-7B (ReLU)": "–", "Persimmon-8B": "3.0×", "Phi-2": "2.0×",
        "Llama 2 7B (FATReLU)": "–",
    }  # fmt: skip
    assert rows["share of a token's time"]["here"] == "2.7%"
    assert len(draw("table4", parts).tables) == 2
    alone = draw("table4", {"predictors": predictor_card()})
    assert len(alone.tables) == 1
    assert cells(alone.tables[0])["share of a token's time"]["here"] == "–"


def test_table5_shares_of_the_model() -> None:
    rows = cells(draw("table5", all_parts()).tables[0])
    assert rows["FFN neurons (slots)"] == {"bytes": "10.0 MB", "share": "10%", "paper": "15.5%"}
    assert rows["KV cache"]["paper"] == "–"
    assert rows["total planned"] == {"bytes": "50.0 MB", "share": "50%", "paper": "52.1%"}
    assert rows["floor: resident"]["share"] == "37%"
    assert rows["peak measured"]["bytes"] == "50.4 MB"


def test_figure2b_has_the_papers_chunks() -> None:
    rows = cells(draw("figure2b", all_parts()).tables[0])
    assert (rows["8 KiB"]["paper"], rows["16 KiB"]["paper"], rows["1 GiB"]["paper"]) == (
        "1.25 GB/s", "2.25 GB/s", "6.10 GB/s",
    )  # fmt: skip
    assert (rows["4 KiB"]["paper"], rows["1 GiB"]["threads/32"]) == ("–", "–")
    assert rows["4 MiB"]["share"] == "96%"  # of io_uring's, the fastest direct one
    assert rows["4 KiB"]["threads/1"] == "41.5 MB/s"


def test_figure4a_and_figure9_beside_the_paper() -> None:
    four = cells(draw("figure4a", all_parts()).tables[0])["k = 4"]
    assert (four["new"], four["paper_new"], four["kept"], four["paper_kept"]) == ("1.3%", "2.4%", "15%", "24%")
    rows = cells(draw("figure9", all_parts()).tables[0])
    assert rows["layer 0"]["active"] == "3%"
    assert (rows["layer 0"]["predicted"], rows["layer 0"]["of_active"]) == ("3.08%", "2%")
    whole = rows["all layers"]
    assert (whole["active"], whole["paper_active"], whole["paper_predicted"]) == ("6.5%", "3%", "10%")
    alone = cells(draw("figure9", {"sparsity": sparsity_record()}).tables[0])
    assert alone["all layers"]["predicted"] == "–"
    with pytest.raises(RecordError, match="is not the card of predictors for this model"):
        draw("figure9", {"sparsity": sparsity_record(), "predictors": predictor_card(3)})


def test_figure7_has_the_floor_in_the_row() -> None:
    drawn = draw("figure7", all_parts())
    row = cells(drawn.tables[0])["k = 4"]
    assert (row["total"], row["floor"], row["over"]) == ("5.20", "2.00", "2.6×")
    assert "The fastest that fits is k = 4" in drawn.headline


def test_figure8_drift_floor_and_what_was_not_measured() -> None:
    drawn = draw("figure8", all_parts())
    greedy, nucleus = cells(drawn.tables[0])["greedy"], cells(drawn.tables[0])["nucleus"]
    assert (greedy["first"], greedy["early"], greedy["late"], greedy["drift"]) == ("310", "3.20", "3.20", "1.00×")
    assert (greedy["floor"], greedy["over"], greedy["rss"]) == ("2.00", "1.6×", "50.0 MB to 51.0 MB")
    assert (nucleus["first"], nucleus["floor"], nucleus["rss"]) == ("not measured", "not measured", "not measured")
    assert "greedy 3.20 to 3.20 ms (1.00×, flash bytes 1.00×)" in drawn.headline


def test_a_long_run_that_was_cut_short_is_drawn() -> None:
    data = long_run_record(3)
    for row in data["rows"]:
        for name in ("io_ms", "total_ms", "flash_bytes"):
            row[name] = row[name][:3]
    drawn = draw("figure8", {"long_run": data})
    assert cells(drawn.tables[0])["greedy"]["drift"] == "–"
    assert "not measured" in drawn.headline
    data["rows"][0]["total_ms"] = [1.0]
    with pytest.raises(RecordError, match="total_ms"):
        read_long_run(data)


def test_running_median() -> None:
    assert running_median([5, 1, 9, 2, 3], 3) == [3, 5, 2, 3, 2.5]


def test_appendices() -> None:
    families = cells(draw("appendix_f", all_parts()).tables[0])
    assert families["demo-opt"] | {"new": "", "floor": ""} == {
        "zeros": "93.5%", "over": "2.2×", "missed": "4.1%", "kept": "15%", "new": "", "dram": "50%", "faster": "17.7×",
        "floor": "",
    }  # fmt: skip
    assert (families["paper: Phi-2"]["dram"], families["paper: Falcon-7B (ReLU)"]["kept"]) == ("65%", "33%")
    texts = draw("appendix_g", all_parts())
    assert texts.headline.startswith("1 of 2 greedy continuations")
    assert "<mark> x c</mark>" in texts.extra_html
    assert "bundles of friends read 1.9× the bytes" in draw("appendix_d", all_parts()).headline
    mmlu = cells(draw("figure10", all_parts()).tables[0])["predicted, 5% missed"]
    assert (mmlu["acc"], mmlu["change"], mmlu["missed"]) == ("58.0 ± 1.2", "-3.0", "5.0%")


def test_hostile_text_is_escaped_and_synthetic_is_said(tmp_path: Path) -> None:
    data = ablation_record(model=HOSTILE, synthetic=True, command=HOSTILE)
    for row in data["rows"]:
        row["text"] = HOSTILE
    texts = texts_record()
    texts["run"]["model"] = texts["pairs"][0]["prompt"] = HOSTILE
    command = HOSTILE.replace("`", "'")  # in Markdown, inside backticks
    found = tables("table3", "appendix_g", records=[data, texts], out=tmp_path)
    for path in found.paths:
        if path.suffix in (".html", ".md"):
            text = path.read_text().replace(f"`{command}`", "")
            assert "<script>" not in text.replace("\\<", ""), path
            assert path.suffix == ".html" or "![x](javascript:1)" not in text, path
    assert "Synthetic weights" in (tmp_path / "table3.md").read_text()
    assert "synthetic weights" in (tmp_path / "table3.html").read_text()
    assert "(synthetic weights)" in (tmp_path / "index.md").read_text()
    assert "<script>" not in found._repr_html_()


def test_stored_records_are_drawn_by_their_names(tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    assert stored_tables(folder=stored)._repr_html_() == "<p>No stored tables are here.</p>"
    (stored / "table2-opt-6.7b.json").write_text(json.dumps(ablation_record()))
    wrapped = {"schema": 1, "kind": "table", "table": "figure9", "title": "",
               "records": {"sparsity": sparsity_record(), "predictors": predictor_card()}}  # fmt: skip
    (stored / "figure9.json").write_text(json.dumps(wrapped))
    found = stored_tables(folder=stored, out=tmp_path / "docs")
    assert [drawn.files for drawn in found] == ["table2-opt-6.7b", "figure9"]
    written = sorted(path.name for path in (tmp_path / "docs").iterdir())
    assert written == ["figure9.md", "figure9.png", "index.md", "table2-opt-6.7b.md"]
    assert "](figure9.png)" in (tmp_path / "docs" / "figure9.md").read_text()
    assert "](table2-opt-6.7b.md)" in (tmp_path / "docs" / "index.md").read_text()
    assert (tmp_path / "docs" / "figure9.png").read_bytes().startswith(PNG)
    assert [drawn.name for drawn in stored_tables("figure9", folder=stored)] == ["figure9"]
    (stored / "other.json").write_text("{}")
    with pytest.raises(RecordError, match=r"is not named NAME-what\.json"):
        stored_tables(folder=stored)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    cases = [
        (lambda: tables("table9", out=tmp_path), "'table9' is not a table or figure; choose of table1, table2"),
        (lambda: tables("table2", records=[flash_record()], out=tmp_path), "table2 is drawn from a record of ablation"),
        (lambda: gather([{"kind": "generation"}]), "no table is drawn from a record of kind 'generation'"),
        (lambda: gather([tmp_path / "absent.json"]), "could not be read"),
        (lambda: gather([ablation_record(), ablation_record(model="b")]), "holds the part 'ablation', and so does"),
        (lambda: gather([{"kind": "table", "records": []}]), "has no records"),
        (lambda: name_of("figure99-a"), "figure99-a.json is not named"),
        (lambda: draw("table5", {"dram": dram_record() | {"model_bytes": 0}}), "model_bytes is 0"),
    ]
    for call, says in cases:
        with pytest.raises(RecordError) as caught:
            call()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_damaged_record_in_the_folder_is_named_in_the_index(tmp_path: Path) -> None:
    (tmp_path / "figure7.json").write_text("{")
    tables("table5", records=[dram_record()], out=tmp_path)
    text = (tmp_path / "index.md").read_text()
    assert "figure7.json: is not a whole JSON record" in text
    assert "[Table 5" in text


def test_an_evaluations_parts() -> None:
    assert set(gather([evaluation_record()])) == {"evaluation"}
    assert set(gather([evaluation_record("mmlu", text=False)])) == {"mmlu"}
    assert set(gather([evaluation_record("mmlu", "arc_easy")])) == {"evaluation", "mmlu", "tasks"}


def test_drawing_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps(ablation_record()))
    code = "import sys; from workbench.report.tables import tables; "
    code += f"tables(records=[{str(path)!r}], out={str(tmp_path / 'out')!r}); "
    code += "print([m for m in ('torch', 'transformers', 'workbench._native') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert sorted(path.name for path in (tmp_path / "out").glob("*.md")) == ["index.md", "table2.md", "table3.md"]


def test_every_module_of_a_table_is_registered() -> None:
    folder = Path(package.__path__[0])
    modules = {path.stem for path in folder.glob("*.py") if path.stem.startswith(("table", "figure", "appendix"))}
    assert modules == set(ENTRIES)
