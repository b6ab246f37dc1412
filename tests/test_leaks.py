"""The fixture of conftest.py is itself seen to fail, in a pytest of its own."""

import re
import subprocess
import sys
from pathlib import Path

LEAKS = {
    "the process": "subprocess.Popen(['sleep', '60'])",
    "sleep 61": "subprocess.run(['setsid', '--fork', 'sleep', '61'])",
    "the thread forgotten": "threading.Thread(target=time.sleep, args=(5,), name='forgotten').start()",
    "the environment variable LEFT": "os.environ['LEFT'] = '1'",
    "the default process group": (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
    "the open namespace": "os.open('/proc/self/ns/net', os.O_RDONLY)",
}
"""What the failure says → a test's body that deserves it."""


def test_every_leak_fails_its_test_and_a_clean_test_passes(tmp_path: Path):
    here = Path(__file__).parent
    bodies = [*LEAKS.values(), "pass"]
    tests = [f"def test_{i}():\n    {body}\n" for i, body in enumerate(bodies)]
    (tmp_path / "test_it.py").write_text("import os, subprocess, threading, time\n" + "\n".join(tests))
    impatient = (here / "conftest.py").read_text().replace("PATIENCE_S = 2.0", "PATIENCE_S = 0.2")
    (tmp_path / "conftest.py").write_text(impatient)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run([*words, tmp_path], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    for fault in LEAKS:
        assert re.search(f"left behind: .*{fault}", done.stdout), done.stdout
    assert f"{len(bodies)} passed, {len(LEAKS)} errors" in done.stdout
