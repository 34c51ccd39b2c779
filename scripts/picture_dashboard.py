"""The README's picture of the dashboard, docs/pictures/dashboard.png, of a search run for it.

    python scripts/picture_dashboard.py [PNG]

Needs playwright and Chromium (`make setup servers`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WORK = """
import math, random

def train(lr, momentum, width, optimizer, ctx):
    draw = random.Random(f"{lr} {momentum} {width}")
    far = abs(math.log10(lr) + 2.4) / 2 + abs(momentum - 0.9) + abs(math.log2(width) - 7) / 9
    best = 0.96 - 0.22 * far - (0.03 if optimizer == "sgd" else 0.0)
    for epoch in range(1, 28):
        accuracy = best * (1 - math.exp(-epoch / 6)) + draw.uniform(-0.006, 0.006)
        ctx.log(epoch, accuracy=accuracy)
    return {"accuracy": accuracy}
"""
SEARCH = [
    "--space", "lr=log(1e-5,1e-1)", "--space", "momentum=uniform(0.5,0.99)",
    "--space", "width=logint(16,512)", "--space", "optimizer=choice(adam,sgd,lion)",
    "--maximize", "accuracy", "--trials", "60",
    "--devices", "cpu:2", "--quiet", "--run-dir", "runs/digits-search",
]  # fmt: skip
ADDRESS = re.compile(r"http://\S+#\S+")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.py").write_text(WORK)
        muster = [sys.executable, "-m", "muster"]
        subprocess.run([*muster, "sweep", "work.py:train", *SEARCH], cwd=folder, check=True)
        web = subprocess.Popen([*muster, "web"], cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert web.stdout is not None
            address = next(found[0] for line in web.stdout if (found := ADDRESS.search(line)))
            draw(address, target)
        finally:
            web.terminate()
            web.wait()


def draw(address: str, target: Path) -> None:
    with sync_playwright() as started:
        path = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 860})
        page.goto(address)
        page.click("a[data-row]")
        page.click("nav.tabs a:has-text('Search')")
        page.wait_for_selector("canvas.parallel")
        page.wait_for_timeout(1000)
        page.screenshot(path=target)
        browser.close()
    # As many colours as the page has, without those between them.
    Image.open(target).convert("RGB").quantize(128).save(target, optimize=True)
    size = target.stat().st_size
    assert size < 200_000, f"{target} has {size:,} bytes; the README loads it each time"


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    main(Path(sys.argv[1]) if sys.argv[1:] else here / "docs" / "pictures" / "dashboard.png")
