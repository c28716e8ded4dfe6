"""Page table, compared with published figures and real configs."""

import json
from pathlib import Path

import pytest

from sharding.page_table import MODELS, FfnShape, engine_rows, main, rows

MIB = 1 << 20
CONFIGS = {
    "GPT-OSS-120B": "gpt-oss-120b",
    "GPT-OSS-20B": "gpt-oss-20b",
    "Llama-3.1-70B": "Llama-3.1-70B",
    "Qwen2.5-32B": "Qwen2.5-32B",
}
# Published by Gyges: number of 2 MiB pages at TP1 and TP4.
PUBLISHED = {
    ("GPT-OSS-120B", "down"): (1012.5, 253.125),
    ("GPT-OSS-120B", "gate_up"): (2025, 506.25),
    ("GPT-OSS-20B", "down"): (253.125, 63.28125),
    ("GPT-OSS-20B", "gate_up"): (506.25, 126.5625),
    ("Llama-3.1-70B", "down"): (224, 56),
    ("Qwen2.5-32B", "down"): (135, 33.75),
}


def test_pages_are_those_published():
    table = {(row.model, row.tensor): row for model in MODELS for row in rows(model, 2 * MIB)}
    for key, (whole, shard) in PUBLISHED.items():
        assert (table[key].pages, table[key].shard_pages) == (whole, shard)
    assert table["Qwen2.5-32B", "down"].stored_pages == 34
    assert table["Qwen2.5-32B", "down"].padding == pytest.approx(34 / 33.75 - 1)
    assert table["Llama-3.1-70B", "gate"].padding == 0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_are_those_of_their_configs(model: FfnShape, shared_data: Path):
    config = json.loads((shared_data / "configs" / CONFIGS[model.name] / "config.json").read_text())
    assert FfnShape.from_hf(model.name, config) == model


@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
def test_engine_pads_whole_inner_features(page_size: int):
    """Shards are whole pages of whole features, with the minimum number of features."""
    for model in MODELS:
        page_elems = model.kv_page_elems(page_size)
        down, gate_up = engine_rows(model, page_size)
        assert gate_up.stored_pages == 2 * down.stored_pages
        matrices = max(model.num_experts // 4, 1)
        features, rest = divmod(down.stored_pages * page_elems, matrices * model.hidden_size)
        needed = model.ffn_size if model.num_experts > 1 else model.ffn_size / 4
        assert rest == 0
        assert features >= needed
        rows = matrices * model.hidden_size
        smaller = [n for n in range(int(needed), features) if n >= needed and n * rows % page_elems == 0]
        assert not smaller, model.name


def test_packed_experts_of_gpt_oss_need_no_padding():
    (model,) = [model for model in MODELS if model.name == "GPT-OSS-20B"]
    found = [(row.stored_pages, row.padding, round(row.alone_padding or 0, 4)) for row in engine_rows(model, 16)]
    assert found == [(4050, 0, 0.0667), (8100, 0, 0.0667)]


def test_packed_experts_beside_pages_of_the_papers():
    """Pages of 2 MiB at TP4: 63.28 and 126.56 become 64 and 127, and 64 and 128 if each expert is padded alone."""
    (model,) = [model for model in MODELS if model.name == "GPT-OSS-20B"]
    assert [(row.stored_pages, row.alone_pages) for row in rows(model, 2 * MIB)] == [(64, 64), (127, 128)]


def test_command_reads_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    (path := tmp_path / "config.json").write_text(json.dumps(config))
    for argument in (path, tmp_path):
        main([str(argument), "--page-bytes", "1MiB"])
        cells = [[cell.strip() for cell in line.split("│")[2:-1]] for line in capsys.readouterr().out.splitlines()]
        assert ["down", "8", "2", "2", "0.00%", ""] in cells


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-bytes", "lots"], "'lots' is not a memory size"),
        (["--page-bytes", "0"], "page_bytes is 0; it must be at least 1"),
        (["--page-size", "12"], "--page-size is 12; it must be a power of two"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_config_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"vision: config\.json has no 'hidden_size'"):
        FfnShape.from_hf("vision", {"num_attention_heads": 8})
