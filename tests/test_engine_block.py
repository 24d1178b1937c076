"""The `engine` block of /props: figures from files, placement of loaded weights, arguments.

Every expected figure is worked out here from the shapes, never taken from the code under test.
Synthetic model directories hold headers only: their files are sparse.
"""

import argparse
import json
import os
import shutil
from math import prod
from types import SimpleNamespace as Stub

import cpu_exllamav3
import pytest
import tiny_model
import torch

import engine

cpu_exllamav3.install()
torch.set_num_threads(1)

from exllamav3 import model_init, version  # the stand-ins must be in place first

ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1}

# The tiny models: 2 layers, hidden 128, 8 query heads and 4 key heads of 32, ffn 256, 1,024 tokens.
TABLE = 1024 * 128
NORMS = 2 * (128 + 128) + 128  # two per layer and the last one
ATTENTION = ((128, 256, 4), (128, 128, 4), (128, 128, 3.5), (256, 128, 4))  # q k v o: in, out, bits
FFN = ((128, 256, 4), (128, 256, 4), (256, 128, 4))  # gate, up, down; down in layer 1 has 5 bits
HEAD = (128, 1024, 6)
MARKER = 4  # bytes of `mul1`. A file has one for each linear, a process one for all of them


def exl3_bytes(*linears, marker=0):
    """Bytes of EXL3 linears (in, out, bits): the weights, then suh and svh in float16."""
    return sum(int(i * o * bits / 8) + 2 * (i + o) + marker for i, o, bits in linears)


def weights(*linears):
    return sum(i * o for i, o, _ in linears)


def head_bias(kind):
    """Elements of the output bias, which a tiny model may or may not have."""
    details = json.loads((tiny_model.cached(kind) / "quantization_config.json").read_text())
    return 1024 if "lm_head.bias" in details["tensor_storage"]["lm_head"]["stored_tensors"] else 0


def write_safetensors(path, tensors):
    """Writes a file for `tensors`, {name: (dtype, shape)}: a header, then a hole."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)


def write_model(directory, tensors, **config):
    write_safetensors(directory / "model.safetensors", tensors)
    config = {"architectures": ["X"], "num_hidden_layers": 2} | config
    (directory / "config.json").write_text(json.dumps(config))
    return engine.disk_facts(str(directory))


DENSE = {
    "model.embed_tokens.weight": ("F16", [1000, 64]),
    "model.layers.0.self_attn.q_proj.weight": ("F16", [64, 64]),
    "model.layers.1.mlp.up_proj.weight": ("F16", [256, 64]),
    "model.norm.weight": ("F16", [64]),
    "lm_head.weight": ("F16", [1000, 64]),
}
DENSE_ACTIVE = 2 * (64 + 64 * 64 + 256 * 64 + 64 + 1000 * 64)


# ==== Figures of the tiny models ==================================================================


def test_a_float16_model_has_its_figures():
    directory = tiny_model.cached("fp16")
    sizes = [path.stat().st_size for path in directory.iterdir()]
    params = 2 * TABLE + 2 * (weights(*ATTENTION) + weights(*FFN)) + NORMS
    assert engine.disk_facts(str(directory)) == {
        "format": "FP16",
        "arch": "LlamaForCausalLM",
        "quant": "FP16",
        "bytes": sum(sizes),
        "files": len(sizes),
        "params": params,
        "n_layers": 2,
        "n_experts": 0,
        "n_experts_used": 0,
        "ctx_train": 32768,
        "active_bytes_per_token": 2 * (params - TABLE + 128),
    }


def test_an_exl3_model_has_its_figures():
    facts = engine.disk_facts(str(tiny_model.cached("exl3")))
    bias = head_bias("exl3")
    layer_1 = (*FFN[:2], (256, 128, 5))
    linears = (*ATTENTION, *FFN, *ATTENTION, *layer_1, HEAD)
    assert facts["format"] == "EXL3"
    assert facts["params"] == TABLE + weights(*linears) + NORMS + bias
    assert facts["active_bytes_per_token"] == exl3_bytes(*linears, marker=MARKER) + 2 * (
        NORMS + bias + 128
    )


def test_a_mixture_of_experts_counts_the_experts_that_a_token_uses():
    facts = engine.disk_facts(str(tiny_model.cached("exl3_moe")))
    bias = head_bias("exl3_moe")
    attention = [(i, o, 4) for i, o, _ in ATTENTION] * 2
    router_and_norms = 2 * (4 * 128 + 2 * 32) + NORMS
    assert (facts["n_experts"], facts["n_experts_used"]) == (4, 2)
    assert facts["params"] == (
        TABLE + weights(*attention, HEAD) + 2 * 4 * weights(*FFN) + router_and_norms + bias
    )
    assert facts["active_bytes_per_token"] == (
        exl3_bytes(*attention, HEAD, marker=MARKER)
        + 2 * 2 * exl3_bytes(*FFN, marker=MARKER)
        + 2 * (router_and_norms + bias + 128)
    )


@pytest.mark.parametrize(
    ("bits", "head_bits", "quant"),
    [
        ("4.05", "6.0", "EXL3 4.05 bpw · head 6.0"),
        ("4.0", "6", "EXL3 4.0 bpw · head 6"),
        ("3.10", "8", "EXL3 3.10 bpw · head 8"),
        ("2", None, "EXL3 2 bpw"),
    ],
)
@pytest.mark.parametrize("where", ["config.json", "quantization_config.json"])
def test_bits_are_shown_as_the_file_has_them(tmp_path, bits, head_bits, quant, where):
    head = f', "head_bits": {head_bits}' if head_bits else ""
    details = f'{{"quant_method": "exl3", "bits": {bits}{head}}}'
    wrapped = f'{{"quantization_config": {details}}}' if where == "config.json" else details
    (tmp_path / where).write_text(wrapped)
    assert engine.disk_facts(str(tmp_path))["quant"] == quant


@pytest.mark.parametrize(
    ("dtype", "stored_as"), [("BF16", "BF16"), ("F32", "FP32"), ("F16", "FP16")]
)
def test_a_model_without_quantization_is_named_after_its_type(tmp_path, dtype, stored_as):
    facts = write_model(tmp_path, {"lm_head.weight": (dtype, [8, 8]), "norm.weight": ("F32", [8])})
    assert (facts["format"], facts["quant"]) == (stored_as, stored_as)


def test_another_quantization_goes_by_its_name_and_its_scales_are_no_parameters(tmp_path):
    tensors = {
        "lm_head.weight": ("F8_E4M3", [256, 128]),
        "lm_head.weight_scale_inv": ("F32", [2, 1]),
        "model.layers.0.router.scale": ("F16", [128]),  # a parameter in spite of its name
    }
    facts = write_model(tmp_path, tensors, quantization_config={"quant_method": "fp8"})
    assert (facts["format"], facts["quant"]) == ("FP8", "FP8")
    assert facts["params"] == 256 * 128 + 128


# ==== Which files count ===========================================================================


def test_hidden_files_and_folders_do_not_count(tmp_path):
    write_model(tmp_path, DENSE)
    for aside in (tmp_path / ".cache", tmp_path / "original"):
        aside.mkdir()
        shutil.copy(tmp_path / "model.safetensors", aside)
    (tmp_path / ".model.safetensors").write_bytes(b"no header at all")
    (tmp_path / ".gitattributes").write_text("x")
    facts = engine.disk_facts(str(tmp_path))
    own = [tmp_path / "model.safetensors", tmp_path / "config.json"]
    assert facts["files"] == 2
    assert facts["bytes"] == sum(path.stat().st_size for path in own)
    assert facts["params"] == 2 * 64000 + 64 * 64 + 256 * 64 + 64


def test_all_parts_of_a_model_count(tmp_path):
    names = list(DENSE)
    whole = write_model(tmp_path, DENSE)
    write_safetensors(tmp_path / "model.safetensors", {n: DENSE[n] for n in names[:2]})
    write_safetensors(tmp_path / "more.safetensors", {n: DENSE[n] for n in names[2:]})
    parts = engine.disk_facts(str(tmp_path))
    assert parts["files"] == 3
    for key in ("params", "active_bytes_per_token"):
        assert parts[key] == whole[key]


def damaged(kind, path):
    good = path.read_bytes()
    header = {"w": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
    raw = {
        "empty": b"",
        "five bytes": good[:5],
        "cut in the header": good[:60],
        "cut in the data": good[:-1],
        "not safetensors": b"GIF89a" + bytes(100),
        "a header longer than any": b"\xff" * 8 + good[8:],
        "no object": b"\x02" + bytes(7) + b"[]",
        "no text": b"\x02" + bytes(7) + b"\xff\xff",
    }
    if kind in raw:
        return raw[kind]
    if kind == "no offsets":
        del header["w"]["data_offsets"]
    elif kind == "one offset":
        header["w"]["data_offsets"] = [0]
    elif kind == "no shape":
        del header["w"]["shape"]
    else:
        header["w"] = 7
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + bytes(8)


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "five bytes",
        "cut in the header",
        "cut in the data",
        "not safetensors",
        "a header longer than any",
        "no object",
        "no text",
        "no offsets",
        "one offset",
        "no shape",
        "no entry",
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, kind):
    write_model(tmp_path, DENSE)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged(kind, path))
    with pytest.raises(engine.LoadError, match=r"model\.safetensors is damaged"):
        engine.disk_facts(str(tmp_path))


# ==== Active bytes ================================================================================


def test_a_dense_model_needs_all_but_the_embedding_table(tmp_path):
    assert write_model(tmp_path, DENSE)["active_bytes_per_token"] == DENSE_ACTIVE


def test_without_an_output_layer_the_whole_table_is_read_as_one(tmp_path):
    tied = {name: shape for name, shape in DENSE.items() if name != "lm_head.weight"}
    facts = write_model(tmp_path, tied, tie_word_embeddings=True)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE - 2 * 64  # the row is part of the table


def test_a_second_table_is_never_the_output_layer(tmp_path):
    tied = {name: shape for name, shape in DENSE.items() if name != "lm_head.weight"}
    second = {"model.embed_tokens_per_layer.weight": ("F16", [1000, 512])}
    facts = write_model(tmp_path, tied | second)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE - 2 * 64 + 2 * 512


def test_a_quantized_output_layer_of_a_tied_model_is_an_output_layer(tmp_path):
    tensors = {name: shape for name, shape in DENSE.items() if name != "lm_head.weight"}
    head = {"lm_head.trellis": ("I16", [4, 64, 64])}
    head |= {"lm_head.suh": ("F16", [64]), "lm_head.svh": ("F16", [1024])}
    facts = write_model(tmp_path, tensors | head, tie_word_embeddings=True)
    n_head = 2 * (4 * 64 * 64 + 64 + 1024)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE - 2 * 1000 * 64 + n_head


OUTSIDE = {
    "mtp.layers.0.self_attn.q_proj.weight": ("F16", [64, 64]),
    "mtp.fc.weight": ("F16", [64, 128]),
    "model.mtp_layers.0.mlp.up_proj.weight": ("F16", [64, 64]),
    "model.layers.2.eh_proj.weight": ("F16", [64, 128]),  # of two layers, this is the third
    "model.layers.2.mlp.experts.5.up_proj.weight": ("F16", [64, 64]),
    "model.visual.blocks.0.attn.qkv.weight": ("F16", [64, 192]),
    "visual.merger.mlp.0.weight": ("F16", [64, 64]),
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": ("F16", [64, 64]),
    "vision_tower.vision_model.embeddings.patch_embedding.weight": ("F16", [64, 3, 14, 14]),
    "model.vision_adapter.mlp.fc1.weight": ("F16", [64, 64]),
    "multi_modal_projector.linear_1.weight": ("F16", [64, 64]),
    "model.multi_modal_projector.linear_2.weight": ("F16", [64, 64]),
    "model.embed_vision.embedding_projection.weight": ("F16", [64, 64]),
    "model.audio_tower.conv.weight": ("F16", [64, 64]),
    "model.vit_large_projector.weight": ("F16", [64, 64]),
    "mlp1.1.weight": ("F16", [64, 64]),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_vision_and_mtp_tensors_are_parameters_but_not_active(tmp_path, name):
    dtype, shape = OUTSIDE[name]
    plain = write_model(tmp_path, DENSE)
    facts = write_model(tmp_path, DENSE | {name: (dtype, shape)})
    assert facts["params"] == plain["params"] + prod(shape)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE
    assert (facts["n_experts"], facts["n_experts_used"]) == (0, 0)


INSIDE = (
    "model.layers.1.self_attn.indexer.wk.weight",
    "language_model.model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
    "model.layers.0.share_expert.up_proj.weight",
    "model.layers.0.mlp.experts.e_score_correction_bias",
    "model.layers.0.router.proj.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.moe.gate.weight",
    "backbone.layers.1.mixer.in_proj.weight",
    "model.layers.0.linear_attn.in_proj_qkvz.weight",
    "model.embed_tokens.embed_norm.weight",
    "model.embedding_norm.weight",
    "hc_head_fn",
)


@pytest.mark.parametrize("name", INSIDE)
def test_everything_else_is_needed_whole(tmp_path, name):
    facts = write_model(tmp_path, DENSE | {name: ("F16", [64, 10])})
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE + 2 * 64 * 10


@pytest.mark.parametrize(
    ("table", "head"),
    [
        ("model.embed_tokens", "lm_head"),
        ("model.language_model.embed_tokens", "lm_head"),
        ("language_model.backbone.embeddings", "language_model.lm_head"),
        ("model.word_embeddings", "lm_head"),
        ("embed", "head"),
    ],
)
def test_tables_and_output_layers_are_known_by_all_their_names(tmp_path, table, head):
    tensors = {f"{table}.weight": ("BF16", [500, 32]), f"{head}.weight": ("BF16", [500, 32])}
    facts = write_model(tmp_path, tensors)
    assert facts["active_bytes_per_token"] == 2 * (32 + 500 * 32)


EXPERT_LAYOUTS = {
    "one by one": {
        f"model.layers.1.mlp.experts.{e}.{p}.weight": ("F16", [32, 64])
        for e in range(8)
        for p in ("gate_proj", "up_proj", "down_proj")
    },
    "Mixtral": {
        f"model.layers.1.block_sparse_moe.experts.{e}.{p}.weight": ("F16", [32, 64])
        for e in range(8)
        for p in ("w1", "w2", "w3")
    },
    "stacked": {
        "model.layers.1.mlp.experts.gate_up_proj": ("F16", [8, 64, 64]),
        "model.layers.1.mlp.experts.down_proj": ("F16", [8, 32, 64]),
    },
    "Step": {
        f"model.layers.1.moe.{p}.weight": ("F16", [8, 32, 64])
        for p in ("gate_proj", "up_proj", "down_proj")
    },
}
EXPERT_KEYS = [
    ("num_experts", "num_experts_per_tok"),
    ("n_routed_experts", "num_experts_per_tok"),
    ("num_local_experts", "num_experts_per_token"),
    ("moe_num_experts", "moe_k"),
    ("moe_num_experts", "moe_top_k"),
    ("num_experts", "top_k_experts"),
]


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n_key", "used_key"), EXPERT_KEYS)
def test_routed_experts_count_as_many_as_are_used(tmp_path, layout, nested, n_key, used_key):
    config = {n_key: 8, used_key: 3, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    config = {"text_config": config, "num_experts": "none of this"} if nested else config
    facts = write_model(tmp_path, DENSE | EXPERT_LAYOUTS[layout], **config)
    assert (facts["n_experts"], facts["n_experts_used"], facts["ctx_train"]) == (8, 3, 4096)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE + 2 * 3 * (3 * 32 * 64)


# ==== What the files do not tell ==================================================================


def test_experts_in_the_configuration_alone_are_no_experts(tmp_path):
    facts = write_model(tmp_path, DENSE, num_local_experts=8, num_experts_per_tok=2)
    assert (facts["n_experts"], facts["n_experts_used"]) == (0, 0)
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE


def test_experts_of_unknown_use_leave_the_active_bytes_out(tmp_path):
    facts = write_model(tmp_path, DENSE | EXPERT_LAYOUTS["one by one"], num_experts=8)
    assert facts["n_experts"] == 8
    assert not {"n_experts_used", "active_bytes_per_token"} & facts.keys()


def test_a_table_of_unknown_row_length_leaves_the_parameters_out(tmp_path):
    table = {"model.layers.0.ple.ngram_embedding.shard_0.trellis": ("I16", [5000, 33])}
    facts = write_model(tmp_path, DENSE | table)
    assert "params" not in facts
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE + 2 * 33


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", "{}", '{"num_hidden_layers": "two"}'])
def test_an_unreadable_configuration_leaves_its_keys_out(tmp_path, text):
    write_safetensors(tmp_path / "model.safetensors", DENSE)
    (tmp_path / "config.json").write_text(text)
    facts = engine.disk_facts(str(tmp_path))
    assert not {"arch", "n_layers", "ctx_train"} & facts.keys()
    assert facts["active_bytes_per_token"] == DENSE_ACTIVE


def test_an_empty_folder_has_no_more_than_zero_files(tmp_path):
    assert engine.disk_facts(str(tmp_path)) == {"bytes": 0, "files": 0}


# ==== Placement of a loaded model =================================================================


def load(directory, *flags):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    model_init.add_args(parser, add_draft_model_args=True)
    args = parser.parse_args(["-m", str(directory), "-cs", "512", *flags])
    loaded = model_init.init(args, quiet=True, progress=False)
    return Stub(model=loaded[0], cache=loaded[2], draft=loaded[4], draft_cache=loaded[6])


@pytest.fixture(scope="module")
def exl3():
    return load(tiny_model.cached("exl3"))


@pytest.fixture(scope="module")
def moe():
    return load(tiny_model.cached("exl3_moe"))


@pytest.fixture(scope="module")
def fp16():
    return load(tiny_model.cached("fp16"))


@pytest.mark.parametrize("kind", tiny_model.KINDS)
def test_the_bytes_of_a_device_are_those_of_its_classes_and_of_the_storages(kind, request):
    loaded = request.getfixturevalue({"exl3_moe": "moe"}.get(kind, kind))
    (device,) = engine.placement(loaded.model, loaded.cache)["devices"]
    # exllamav3's own account of its tensors; some are copies, so all are kept until counted
    held = [tensor for part in loaded.model for tensor in part.get_tensors().values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert device["device"] == "CPU"
    assert device["bytes"] == sum(device["classes"].values()) == sum(storages.values())


def test_the_weights_of_an_exl3_model_are_in_their_classes(exl3):
    (device,) = engine.placement(exl3.model, exl3.cache)["devices"]
    assert device["classes"] == {
        "attention": 2 * exl3_bytes(*ATTENTION) + MARKER,
        "experts": 0,
        "ffn": exl3_bytes(*FFN, *FFN[:2], (256, 128, 5)),
        "embeddings": 2 * TABLE,
        "output": exl3_bytes(HEAD) + 2 * head_bias("exl3"),
        "other": 2 * NORMS,
    }


def test_router_and_experts_are_experts(moe):
    (device,) = engine.placement(moe.model, moe.cache)["devices"]
    attention = [(i, o, 4) for i, o, _ in ATTENTION]
    assert device["classes"] == {
        "attention": 2 * exl3_bytes(*attention) + MARKER + 2 * 2 * (2 * 32),  # and head norms
        "experts": 2 * 4 * exl3_bytes(*FFN) + 2 * 2 * 4 * 128,
        "ffn": 0,
        "embeddings": 2 * TABLE,
        "output": exl3_bytes(HEAD) + 2 * head_bias("exl3_moe"),
        "other": 2 * NORMS,
    }


def test_a_tied_model_holds_its_table_twice(tmp_path):
    directory = tmp_path / "tied"
    shutil.copytree(tiny_model.cached("fp16"), directory)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load(directory)
    (device,) = engine.placement(loaded.model, loaded.cache)["devices"]
    assert device["classes"]["embeddings"] == device["classes"]["output"] == 2 * TABLE


def test_a_draft_model_is_other_and_its_weights_count(exl3):
    loaded = load(tiny_model.cached("exl3"), "-dm", str(tiny_model.cached("fp16")))
    alone = engine.placement(exl3.model, exl3.cache)["devices"][0]
    placed = engine.placement(loaded.model, loaded.cache, loaded.draft, loaded.draft_cache)
    (both,) = placed["devices"]
    draft = 2 * (2 * TABLE + 2 * (weights(*ATTENTION) + weights(*FFN)) + NORMS)
    assert both["bytes"] == alone["bytes"] + draft
    assert both["classes"] == alone["classes"] | {"other": 2 * NORMS + draft}


def test_a_cache_in_ram_takes_no_vram(exl3):
    assert engine.placement(exl3.model, exl3.cache)["vram_kv_bytes"] == 0


@pytest.mark.parametrize(
    ("flags", "row_bytes"),
    [((), 4 * 32 * 2), (("-cq", "4"), 4 * 32 * 4 // 8 + 4 * 2), (("-cq", "8"), 4 * 32 + 4 * 2)],
)
def test_the_cache_of_a_loaded_model_is_measured_by_its_tensors(flags, row_bytes, monkeypatch):
    loaded = load(tiny_model.cached("exl3"), *flags)
    with monkeypatch.context() as patch:  # as it would be on a GPU; 512 keys and values, 2 layers
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        patch.setattr(torch.Tensor, "device", Stub(type="cuda", index=0))
        placed = engine.placement(loaded.model, loaded.cache)
    assert placed["vram_kv_bytes"] == 2 * 2 * 512 * row_bytes
    assert [device["device"] for device in placed["devices"]] == ["GPU0"]


# ==== Placement on devices that this machine does not have ========================================


class Tensor:
    """A tensor on GPU `gpu` (None: in RAM) at an address, in a storage of its own or in `slab`."""

    def __init__(self, gpu, address, nbytes, slab=None):
        self.is_cuda, self.device, self.nbytes = gpu is not None, Stub(index=gpu), nbytes
        self.data_ptr = lambda: address
        start, size = slab or (address, nbytes)
        self.untyped_storage = lambda: Stub(data_ptr=lambda: start, nbytes=lambda: size)


def module(kind, key="", *below, **held):
    made = type(kind, (), {"register_submodule": None})()
    vars(made).update(key=key, modules=list(below), **held)
    return made


def model(*modules):
    return Stub(modules=list(modules), loaded_tp=False)


def cache(layers=(), recurrent=()):
    return Stub(layers=dict(enumerate(layers)), recurrent_layers=dict(enumerate(recurrent)))


def classes_by_device(placed):
    for device in placed["devices"]:
        assert device["bytes"] == sum(device["classes"].values())
    return {d["device"]: {k: n for k, n in d["classes"].items() if n} for d in placed["devices"]}


def test_devices_are_listed_in_order_the_cpu_last():
    parts = [module("MLP", w=Tensor(gpu, 10 * n, 8)) for n, gpu in enumerate((10, None, 2, 0))]
    placed = engine.placement(model(*parts), cache())
    assert [d["device"] for d in placed["devices"]] == ["GPU0", "GPU2", "GPU10", "CPU"]
    assert all(set(d["classes"]) == set(engine.CLASSES) for d in placed["devices"])


def test_a_storage_counts_once_however_many_hold_it():
    shared = Tensor(0, 1000, 64)
    parts = module("MLP", w=shared, same=[shared]), module("Linear", "lm_head", w=shared)
    placed = engine.placement(model(*parts), cache())
    assert classes_by_device(placed) == {"GPU0": {"ffn": 64}}


def test_a_module_counts_where_it_is_and_not_where_it_is_referred_to():
    table = module("Embedding", "model.embed_tokens", w=Tensor(0, 1000, 64))
    norm = module("RMSNorm", "model.norm", table=table, w=Tensor(0, 2000, 8))
    placed = engine.placement(model(norm, table), cache())
    assert classes_by_device(placed) == {"GPU0": {"embeddings": 64, "other": 8}}


def test_a_slab_of_the_loader_is_shared_out_to_the_classes_in_it():
    slab = (5000, 1 << 20)
    parts = (
        module("Attention", w=Tensor(0, 5000, 256, slab)),
        module("MLP", w=Tensor(0, 5256, 512, slab), half=Tensor(0, 5256, 512, slab)),
    )
    placed = engine.placement(model(*parts), cache())
    assert classes_by_device(placed) == {"GPU0": {"attention": 256, "ffn": 512}}


def test_a_view_into_a_counted_storage_adds_nothing():
    whole, part = Tensor(0, 1000, 64), Tensor(0, 1032, 32, (1000, 64))
    placed = engine.placement(model(module("MLP", w=whole, lower=part)), cache())
    assert classes_by_device(placed) == {"GPU0": {"ffn": 64}}


def test_caches_and_work_buffers_are_no_weights():
    page, state = (
        module("CacheLayer_fp16", k=Tensor(0, 1, 100), v=Tensor(1, 2, 100)),
        Stub(tensors=[Tensor(0, 3, 7), Tensor(None, 4, 1000)]),
    )
    held = {"cache_layers": [page], "recurrent_layers": [state], "w": Tensor(0, 9, 5)}
    attention = module("Attention", prealloc_kv=Tensor(0, 8, 50), **held)
    placed = engine.placement(model(attention), cache([page], [state]))
    assert classes_by_device(placed) == {"GPU0": {"attention": 5}}
    assert placed["vram_kv_bytes"] == 207
    with_draft = engine.placement(model(attention), cache([page]), model(), cache([], [state]))
    assert with_draft["vram_kv_bytes"] == 207


def test_weights_in_the_processes_of_tensor_parallelism_are_not_guessed():
    assert engine.placement(Stub(loaded_tp=True), cache()) == {}


@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [
        ("Attention", "model.layers.0.self_attn", "attention"),
        ("MLAttention", "model.layers.0.self_attn", "attention"),
        ("SlidingAttention", "model.layers.0.self_attn", "attention"),
        ("DSV4Attention", "layers.0.attn", "attention"),
        ("GatedDeltaNet", "model.layers.0.linear_attn", "attention"),
        ("Mamba2", "backbone.layers.0.mixer", "attention"),
        ("ShortConv", "model.layers.0.conv", "attention"),
        ("NewMixer", "model.layers.0.linear_attn", "attention"),
        ("MLP", "backbone.layers.0.mixer", "ffn"),
        ("GatedMLP", "model.layers.0.feed_forward", "ffn"),
        ("NewMLP", "model.layers.0.mlp", "ffn"),
        ("BlockSparseMLP", "model.layers.0.mlp", "experts"),
        ("BlockSparseMLP", "model.language_model.layers.0", "experts"),
        ("BlockSparseMLP", "backbone.layers.0.mixer", "experts"),
        ("NewExperts", "model.layers.0.block_sparse_moe", "experts"),
        ("GatedMLP", "model.layers.0.mlp.shared_expert", "experts"),
        ("GatedMLP", "model.layers.0.share_expert", "experts"),
        ("Embedding", "model.embed_tokens", "embeddings"),
        ("NGramEmbedding", "model.layers.0.ple.ple_embedding.ngram_embedding", "embeddings"),
        ("Linear", "lm_head", "output"),
        ("Linear", "language_model.lm_head", "output"),
        ("Linear", "head", "output"),
        ("RMSNorm", "model.norm", "other"),
        ("RMSNorm", "model.layers.0.input_layernorm", "other"),
        ("HyperHead", "hc_head", "other"),
    ],
)
def test_a_module_has_the_class_that_its_kind_and_its_key_say(kind, key, expected):
    made = module(kind, key, w=Tensor(0, 1, 8))
    assert classes_by_device(engine.placement(model(made), cache())) == {"GPU0": {expected: 8}}


def test_what_is_below_a_module_has_its_class():
    shared = module("GatedMLP", "model.layers.0.mlp", w=Tensor(0, 1, 8))  # Gemma 4's shared expert
    experts = module("BlockSparseMLP", "model.layers.0", shared)
    norm = module("RMSNorm", "model.layers.0.self_attn.q_norm", w=Tensor(0, 20, 4))
    block = module("TransformerBlock", "model.layers.0", module("Attention", "a", norm), experts)
    placed = engine.placement(model(block), cache())
    assert classes_by_device(placed) == {"GPU0": {"attention": 4, "experts": 8}}


# ==== Arguments and the whole block ===============================================================


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ("", ""),
        ("-m /models/x -cs 8192", "-cs 8192"),
        ("--model_dir /models/x --model-dir y --model=z -m=w -mcl 3", "-mcl 3"),
        ("--host 0.0.0.0 --port 8080 -np 4", "-np 4"),
        ("--host=:: --port=0 --parallel=4", "--parallel=4"),
        ("-mtp --api-key secret --draft-n 2", "-mtp --draft-n 2"),
        ("--api-key=secret --api-key-file /etc/key -cq 4,4", "-cq 4,4"),
        ("--port --host -np 2 --port", "-np 2"),  # a value may look like an option
        ("-gs 20,24 --temp 0.7 -a name", "-gs 20,24 --temp 0.7 -a name"),
        ("-cs 8192 -m", "-cs 8192"),
        ("--api-key=", ""),
        ("--audit-log /var/log/a --log-format=json -np 2", "-np 2"),
    ],
)
def test_arguments_without_addresses_and_keys(argv, kept):
    assert engine.behaviour_args(argv.split()) == kept.split()


def floats_in(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [found for part in value for found in floats_in(part)]
    return [value] if isinstance(value, float) else []


def test_the_block_of_a_loaded_model_is_whole_and_free_of_floats(moe):
    directory = str(tiny_model.cached("exl3_moe"))
    argv = ["-m", directory, "-ngram", "2", "--api-key", "secret"]
    draft = {"model": "n-gram", "n_max": 4}
    block = engine.engine_block(directory, argv, draft, moe.model, moe.cache)
    assert block["name"] == "exllamav3"
    assert block["version"] == version.__version__
    assert block["args"] == ["-ngram", "2"]
    assert block["server_pid"] == os.getpid()
    assert block["draft"] == draft
    assert block["model"] == engine.disk_facts(directory)
    assert block["placement"] == engine.placement(moe.model, moe.cache)
    assert floats_in(json.loads(json.dumps(block))) == []
    assert "secret" not in json.dumps(block)


def test_what_is_not_there_is_absent_from_the_block():
    directory = str(tiny_model.cached("fp16"))
    block = engine.engine_block(directory, [], None, Stub(loaded_tp=True), cache())
    assert set(block) == {"name", "version", "args", "server_pid", "model"}
    assert block["args"] == []
