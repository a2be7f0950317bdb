"""The harness's own tasks, on the hub's data or on the same data in local files.

Local files replace where a task's documents come from and nothing else: prompts, choices and metrics stay those of
lm-evaluation-harness.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import DataError

FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc", "hellaswag": "hellaswag", "mmlu": "mmlu/default"}
"""Where the harness defines the paper's tasks; for other names its whole index is read."""
FIELDS = {
    "ai2_arc": ("question", "choices", "answerKey"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "mmlu": ("question", "choices", "answer"),
}
"""What a document must have, by the hub's name of the data set."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
LOCAL, ENDING = "local", " from files"
"""Names of the groups that stand for the harness's own where documents come from files."""
INSTALL = "pip install 'flash-workbench[eval]'"


@dataclass(frozen=True)
class LoadedTask:
    """One task as asked for, or a group such as mmlu. `loaded` is what the harness's `evaluate` takes.

    source: the hub's data set or the files' names; `sha256` of the files, "" for the hub. subjects: tasks in a group,
    1 for a single task. requests: what one evaluation asks of a model.
    """

    name: str
    loaded: Any
    source: str
    split: str
    sha256: str
    version: str
    subjects: int
    documents: int
    requests: int

    def own_result(self, results: dict[str, Any]) -> dict[str, Any]:
        """Its metrics among the harness's results: the group's where it is one."""
        for name in (self.name, f"{LOCAL}::{self.name}{ENDING}"):
            if name in results:
                return results[name]
        raise DataError(f"{self.name}: the harness gave no result for it; choose a task with metrics of its own")

    def card(self) -> dict[str, Any]:
        """For the record."""
        names = ("name", "source", "split", "sha256", "version", "subjects", "documents", "requests")
        return {name: getattr(self, name) for name in names}


def require_harness() -> str:
    """The version of lm_eval. DataError with the remedy when it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"tasks: lm-evaluation-harness is not installed; {INSTALL}") from None


def load_tasks(names: Sequence[str], tasks_dir: str | Path | None, limit: int | None = None) -> list[LoadedTask]:
    """The tasks with their documents, zero-shot; `limit` documents each (of each subject in a group).

    Raises DataError: lm_eval is missing, no such task, data that cannot be had or read.
    """
    require_harness()
    if tasks_dir is not None and not Path(tasks_dir).is_dir():
        raise DataError(f"{tasks_dir}: no such directory; give one with the tasks' files, such as arc_easy_test.jsonl")
    with quiet():
        manager = _manager(names)
        return [_load(manager, name, None if tasks_dir is None else Path(tasks_dir), limit) for name in names]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines and bars of the harness and its libraries, which would be drawn through the caller's."""
    import datasets
    import lm_eval.api.task as tasks

    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    levels, bars = [log.level for log in loggers], datasets.are_progress_bars_disabled()
    names: Any = vars(tasks)
    own = names["tqdm"]
    for log in loggers:
        log.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    names["tqdm"] = lambda items, **_: items
    try:
        yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        names["tqdm"] = own


def _manager(names: Sequence[str]) -> Any:
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    if any(name not in FOLDERS for name in names):
        return lm_eval.tasks.TaskManager()
    folders: list[str | Path] = [root / folder for folder in sorted({FOLDERS[name] for name in names})]
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)


def _load(manager: Any, name: str, root: Path | None, limit: int | None) -> LoadedTask:
    if name not in manager.task_index:
        raise DataError(f"{name}: no such task of lm-evaluation-harness; give names such as {', '.join(FOLDERS)}")
    local = None if root is None else _LocalData(manager.task_index, name, root)
    try:
        loaded = manager.load([name if local is None else local.group()])
        tasks = list(loaded["tasks"].values())
        for task in tasks:
            task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=0)
            task.build_all_requests(limit=limit, rank=0, world_size=1)
    except DataError:
        raise
    except Exception as error:  # the harness and its libraries raise errors of many classes, the network's among them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if local is None:
            remedy = f"give local files with --tasks-dir, such as {name}_test.jsonl"
            raise DataError(f"{name}: its data could not be had from the hub ({reason}); {remedy}") from error
        raise DataError(
            f"{name}: the harness cannot use {local.source} ({reason}); compare it with the hub's"
        ) from error
    if not tasks:
        raise DataError(f"{name}: the harness defines no documents for it; choose another task")
    config = tasks[0].config
    return LoadedTask(
        name=name,
        loaded=loaded,
        source=f"hub: {config.dataset_path}" if local is None else local.source,
        split=str(config.test_split or config.validation_split),
        sha256="" if local is None else local.sha256,
        version=str(manager.task_index[name].cfg.get("metadata", {}).get("version", "")),
        subjects=len(tasks),
        documents=sum(len({i.doc_id for i in task.instances}) for task in tasks),
        requests=sum(len(task.instances) for task in tasks),
    )


class _LocalData:
    """One task's documents from files under `root`.

    Found as `arc_easy_test.jsonl` (`NAME_SPLIT*`), or in a copy of the hub's data set (`ai2_arc/ARC-Easy/test-*`).
    A group's tasks may lie in one file, `mmlu_test.jsonl`, whose documents name their `subject`.
    """

    def __init__(self, index: Any, name: str, root: Path) -> None:
        self.name, self.root, self.index = name, root, index
        self.files: list[Path] = []
        self._read: dict[Path, list[dict[str, Any]]] = {}
        self.members: list[dict[str, Any]] = []
        leaves = list(_leaves(index, name))
        for leaf in leaves:
            found = self._find(index[leaf].cfg, leaf) or (self._shared(index[leaf].cfg) if leaf != name else None)
            if found:
                self.members.append(self._member(leaf, *found))
        if not self.members:
            config = index[leaves[0]].cfg
            hub, names = config["dataset_path"], " or ".join(f"{name}_{split}.jsonl" for split in _splits(config))
            raise DataError(
                f"{name}: no file for it in {root}; put {names} there, "
                f"or a copy of the hub's {hub} as {Path(hub).name}/"
            )
        unique = sorted(set(self.files))
        self.source = ", ".join(path.name for path in unique[:3]) + (f" and {len(unique) - 3} more" * (len(unique) > 3))
        digest = hashlib.sha256()
        for path in unique:
            digest.update(path.read_bytes())
        self.sha256 = digest.hexdigest()

    def group(self) -> dict[str, Any]:
        """The task, or group, for the harness: its own definitions with their documents replaced."""
        own = self.index[self.name].cfg
        if "group" not in own:
            return {"group": LOCAL, "task": self.members}
        # A group that is defined in place needs a name of its own, and hands its fields on to tasks unless nested.
        inner = {**own, "group": self.name + ENDING, "task": self.members}
        return {"group": LOCAL, "task": [inner]}

    def _find(self, config: dict[str, Any], leaf: str) -> tuple[str, list[dict[str, Any]]] | None:
        """The split to use, the test split rather than the validation split, and its documents."""
        hub, part = Path(config["dataset_path"]).name, config.get("dataset_name")
        folder = self.root / hub / part if part else self.root / hub / "data"
        for split in _splits(config):
            own = sorted(p for p in self.root.glob(f"{leaf}_{split}*") if p.name.endswith(SUFFIXES))
            copied = sorted(p for p in folder.glob(f"{split}*") if p.name.endswith(SUFFIXES)) if folder.is_dir() else []
            paths = own[:1] or copied
            if paths:
                return split, [document for path in paths for document in self._documents(path, hub)]
        return None

    def _shared(self, config: dict[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
        for split in _splits(config):
            for path in sorted(p for p in self.root.glob(f"{self.name}_{split}*") if p.name.endswith(SUFFIXES)):
                all_documents = self._documents(path, Path(config["dataset_path"]).name)
                own = [d for d in all_documents if d.get("subject") == config.get("dataset_name")]
                return (split, own) if own else None
        return None

    def _member(self, leaf: str, split: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
        import datasets

        try:
            table = datasets.Dataset.from_list(documents)
        except Exception as error:  # pyarrow's classes: documents of unlike shapes
            reason = str(error).splitlines()[0]
            raise DataError(f"{self.files[-1]}: documents of unlike shapes ({reason}); download it again") from error
        is_test = split == self.index[leaf].cfg.get("test_split")
        return {
            "task": leaf,
            "test_split": split if is_test else None,
            "validation_split": None if is_test else split,
            "training_split": None,
            "fewshot_split": None,
            "custom_dataset": lambda **_: {split: table},
        }

    def _documents(self, path: Path, hub: str) -> list[dict[str, Any]]:
        self.files.append(path)
        if path not in self._read:
            documents = list(_parquet(path) if path.suffix == ".parquet" else _json_lines(path))
            if not documents:
                raise DataError(f"{path}: it holds no documents; download it again")
            for number, document in enumerate(documents, 1):
                missing = [field for field in FIELDS.get(hub, ()) if field not in document]
                if missing:
                    raise DataError(
                        f"{path}: document {number} has no {missing[0]!r} field; "
                        f"the layout of the hub's {hub} is expected"
                    )
            self._read[path] = documents
        return self._read[path]


def _splits(config: dict[str, Any]) -> list[str]:
    """The splits that a task can be measured on, in the harness's order."""
    return [split for split in (config.get("test_split"), config.get("validation_split") or "validation") if split]


def _leaves(index: Any, name: str) -> Iterator[str]:
    """The single tasks that a task, group or tag of the harness's index stands for."""
    entry = index[name]
    if entry.cfg is None:
        for member in sorted(entry.tags):
            yield from _leaves(index, member)
    elif "group" in entry.cfg:
        for item in entry.cfg["task"]:
            yield from _leaves(index, item if isinstance(item, str) else item.get("task") or item["group"])
    else:
        yield name


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    damaged = (gzip.BadGzipFile, EOFError, zlib.error)
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as stream:
            for line in stream:
                number += 1
                if line.strip():
                    document = json.loads(line)
                    if not isinstance(document, dict):
                        raise ValueError("not an object")
                    yield document
    except damaged as error:
        raise DataError(f"{path}: damaged gzip after line {number} ({error}); download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    except ValueError as error:
        raise DataError(f"{path}: line {number} is not a JSON object ({error}); one a line is expected") from error


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a parquet file that can be read ({reason}); download it again") from error
