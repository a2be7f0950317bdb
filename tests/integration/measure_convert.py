"""Convert and print by how many bytes the process's peak memory grew. Run by test_convert.

usage: measure_convert.py MODEL OUT. Prints {"grown": bytes}.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import make_opt

from workbench.experiments.convert import convert


def status(field: str) -> int:
    """A field of /proc/self/status, bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as warm:
        convert(make_opt(Path(warm) / "opt"), Path(warm) / "store")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    convert(sys.argv[1], sys.argv[2])
    print(json.dumps({"grown": status("VmHWM") - before}))
