"""The live page in headless Chromium while instances merge and split."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_model

from amoeba_jax import LLM, SamplingParams
from sharding.ledger import format_bytes

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.slow,
]
NUM_LAYERS = 12
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
# Milliseconds within which a change must be visible.
SOON_MS = 1000


@pytest.fixture(scope="module")
def deep_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with two devices, and a model whose layers change in several segments."""
    with LLM(
        byte_model(tmp_path_factory.mktemp("deep") / "deep", num_hidden_layers=NUM_LAYERS),
        num_devices=2,
        tensor_parallel_size=1,
        device_memory="64MiB",
        max_num_seqs=4,
        segment_layers=2,
        progress=False,
        compile_cache=compile_cache,
        warmup=[1, 2],
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def started(deep_llm: LLM, start_http: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with start_http(deep_llm) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """Open the page. At the end, check that it logged no errors and sent no requests to other hosts."""
    opened = browser.new_context(**context)
    page, problems = opened.new_page(), []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(url) else problems.append(f"request of {r.url}"))
    page.goto(f"{url}/")
    yield page
    opened.close()
    assert problems == []


def ready(page: Any) -> None:
    page.locator("#status.good", has_text="ready").wait_for()


def test_a_merge_is_visible_soon_and_goes_through_the_layers(browser: Any, started: Any):
    llm = started.llm
    with page_of(browser, started.url) as page:
        ready(page)
        assert page.locator(".instance").count() == 2
        assert page.title() == "2 × TP1 · amoeba"
        # Record each text in the list of changes, with its time.
        page.evaluate("""() => {
            window.seen = [];
            const list = document.getElementById("changes");
            const note = () => window.seen.push([performance.now(), list.textContent]);
            new MutationObserver(note).observe(list, {childList: true});
            const press = () => { window.pressed = performance.now(); };
            document.getElementById("transform").addEventListener("submit", press, true);
        }""")
        generating = threading.Thread(target=lambda: list(llm.stream("on and on", LONG)))
        generating.start()
        page.get_by_role("button", name="Merge to TP2").click()
        page.locator(".degree", has_text="TP2").wait_for()
        page.locator("#result", has_text="TP2 after").wait_for()
        seen, pressed = page.evaluate("[window.seen, window.pressed]")
        first = next(at for at, text in seen if "merge devices 0–1 to TP2" in text)
        assert first - pressed < SOON_MS
        page.locator("#changes li.done", has_text="merge devices 0–1 to TP2: ended after").wait_for()
        assert page.locator(".instance").count() == 1
        page.get_by_role("button", name="Split to TP1").click()
        page.locator("#result", has_text="TP1 after").wait_for()
        page.wait_for_function("document.querySelectorAll('.instance').length === 2")
        generating.join()


def test_bytes_of_devices_are_those_of_the_engine(browser: Any, started: Any):
    memory = started.llm.memory()
    with page_of(browser, started.url) as page:
        ready(page)
        for device in memory.devices:
            shown = page.locator(f'[data-device="{device}"] data')
            assert int(shown.get_attribute("value")) == memory.device_bytes(device)
            assert shown.text_content() == format_bytes(memory.device_bytes(device))
            label = page.locator(f'[data-device="{device}"] canvas').get_attribute("aria-label")
            assert f"temporaries (reserved) {format_bytes(memory.reserved_bytes[device])}" in label
            assert f"unused {format_bytes(memory.unused_bytes(device))}" in label


def test_layers_can_be_read_with_the_keyboard(browser: Any, started: Any):
    with page_of(browser, started.url) as page:
        ready(page)
        page.locator('[data-device="1"] canvas').focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        layer = started.llm.memory().parts(1)[2]
        text = page.locator("#readout").text_content()
        assert text.startswith("device 1, layer 2: TP1[1]; attention and norms ")
        assert f"KV cache free {format_bytes(layer['kv cache free'])}" in text
        page.keyboard.press("End")
        assert page.locator("#readout").text_content().startswith(f"device 1, layer {NUM_LAYERS - 1}: ")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark")])
def test_page_fits_the_width(browser: Any, started: Any, width: int, scheme: str, tmp_path: Path):
    with page_of(browser, started.url, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        ready(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) > 3 * 128
        assert bright == (scheme == "light")
        assert page.locator(".uplot canvas").count() == 3
        page.screenshot(path=tmp_path / "page.png", full_page=True)  # for a person to look at


def test_page_asks_for_the_admin_token(
    browser: Any, served_llm: LLM, start_http: Callable[..., AbstractContextManager[Any]]
):
    with start_http(served_llm, admin_token="of the admin") as started:
        opened = browser.new_context()
        page = opened.new_page()
        page.goto(f"{started.url}/")
        page.get_by_label("Admin token").wait_for()
        page.get_by_label("Admin token").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#login-error", has_text="valid token").wait_for()
        assert page.locator("#page").is_hidden()
        page.get_by_label("Admin token").fill("of the admin")
        page.keyboard.press("Enter")
        ready(page)
        page.reload()
        ready(page)
        assert page.url == f"{started.url}/"
        opened.close()
