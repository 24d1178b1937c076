"""Tests of the CPU stand-ins for exllamav3's kernels and of the tiny models, without the server.

References are written here from the definitions (a dense float32 forward, brute-force searches), so
that a mistake in a stand-in is not repeated in what it is compared with.
"""

import argparse
import json
import math
import shutil

import cpu_exllamav3
import jinja2
import numpy as np
import pytest
import tiny_model
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

cpu_exllamav3.install()
torch.set_num_threads(1)

# Only now that the stand-ins are in place
from exllamav3 import (
    AdaptivePSampler,
    ArgmaxSampler,
    ComboSampler,
    CustomSampler,
    Generator,
    Job,
    LLGuidanceFilter,
    model_init,
)
from exllamav3.generator.sampler import SS_XTC, SS_Sample
from exllamav3.modules import Linear

PROMPTS = ("Hello, world! The ferry", "The user asked about", "def fibonacci(n):\n", "x")
LONG_PROMPT = "The ferry left the harbour, and nobody could say why. It was number {}. "


class Loaded:
    """A loaded model with what is needed to run jobs on it."""

    def __init__(self, kind, *flags):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        model_init.add_args(parser, add_draft_model_args=True)
        self.args = parser.parse_args(["-m", str(tiny_model.cached(kind)), "-cs", "8192", *flags])
        self.progress = []
        loaded = model_init.init(
            self.args,
            quiet=True,
            progress=False,
            callback=lambda done, of: self.progress.append((done, of)),
        )
        self.model, self.config, self.cache, self.tokenizer = loaded[:4]
        self.draft_model, _, self.draft_cache = loaded[4:]

    def generator(self, **options):
        """Returns a fresh generator over the cache, with the options the flags ask for."""
        options = {
            "max_chunk_size": self.args.chunk_size,
            "ngram_match_min": self.args.ngram_match_min,
            "hybrid_draft_tokens": self.args.hybrid_draft_tokens,
            "draft_model": self.draft_model,
            "draft_cache": self.draft_cache,
            "num_draft_tokens": self.args.num_draft_tokens,
            **options,
        }
        return Generator(model=self.model, cache=self.cache, tokenizer=self.tokenizer, **options)

    def job(self, prompt, n_new, **options):
        """Returns a greedy job on a prompt text, unless the options say otherwise."""
        ids = self.tokenizer.encode(prompt, encode_special_tokens=True)
        options = {"sampler": ArgmaxSampler(), **options}
        return Job(input_ids=ids, max_new_tokens=n_new, **options)

    def run(self, prompt, n_new, **options):
        """Runs one job on a fresh generator; returns what `run_jobs` returns for it."""
        return run_jobs(self.generator(), [self.job(prompt, n_new, **options)])[0]


def run_jobs(generator, jobs):
    """Runs jobs to their ends. Returns (tokens, final result) of each."""
    generator.enqueue(jobs)
    tokens, final = {job: [] for job in jobs}, {}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            assert result["stage"] != "error", result.get("error")
            if "token_ids" in result:
                tokens[result["job"]] += result["token_ids"][0].tolist()
            if result["eos"]:
                final[result["job"]] = result
        generator.pagetable.validate_pagetable(generator.active_jobs)
    return [(tokens[job], final[job]) for job in jobs]


@pytest.fixture(scope="module")
def fp16():
    return Loaded("fp16")


@pytest.fixture(scope="module")
def exl3():
    return Loaded("exl3")


@pytest.fixture(scope="module")
def moe():
    return Loaded("exl3_moe")


# --- the forward pass ----------------------------------------------------------------------------


def reference_logits(weights, ids):
    """A Llama forward in float32 without a cache: ids [n] -> logits [n, vocab]."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].float().T

    def norm(x, name):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * weights[f"{name}.weight"].float()

    n, dim = len(ids), tiny_model.HEAD_DIM
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(n).float(), frequencies)
    cos, sin = (torch.cat((f, f), -1)[:, None] for f in (angles.cos(), angles.sin()))

    def rotated(x):
        x = x.view(n, -1, dim)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = weights["model.embed_tokens.weight"].float()[ids]
    hidden = torch.triu(torch.full((n, n), -math.inf), 1)
    for layer in range(tiny_model.LAYERS):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm")
        q = rotated(linear(y, f"{prefix}.self_attn.q_proj"))
        k = rotated(linear(y, f"{prefix}.self_attn.k_proj"))
        v = linear(y, f"{prefix}.self_attn.v_proj").view(n, -1, dim)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim) + hidden
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + linear(y, f"{prefix}.self_attn.o_proj")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, f"{prefix}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head") + weights.get("lm_head.bias", 0)


def dense_weights(loaded):
    """Returns the weights of a loaded EXL3 model as exllamav3 itself reconstructs them."""
    weights = load_file(tiny_model.cached("exl3") / "model.safetensors")
    linears = [m for m in loaded.model if isinstance(m, Linear)]
    assert all(m.quant_type == "exl3" for m in linears)
    return weights | {f"{m.key}.weight": m.inner.get_weight_tensor().T for m in linears}


@pytest.mark.parametrize("kind", ["fp16", "exl3"])
def test_greedy_tokens_are_those_of_a_dense_forward_without_a_cache(kind, request):
    """Half precision may prefer another of two tokens whose logits differ by a hair."""
    loaded = request.getfixturevalue(kind)
    weights = load_file(tiny_model.cached(kind) / "model.safetensors")
    weights = dense_weights(loaded) if kind == "exl3" else weights
    same = total = 0
    for prompt in PROMPTS:
        tokens, _ = loaded.run(prompt, 64)
        ids = loaded.tokenizer.encode(prompt)[0].tolist()
        logits = reference_logits(weights, ids + tokens[:-1])[len(ids) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 0.05
        same += (logits.argmax(-1) == torch.tensor(tokens)).sum().item()
        total += len(tokens)
    assert same >= total - 3


def test_greedy_text_is_the_same_every_time_varied_and_plain(fp16):
    for prompt in PROMPTS:
        tokens, final = fp16.run(prompt, 64)
        assert (tokens, final["eos_reason"]) == (fp16.run(prompt, 64)[0], "max_new_tokens")
        assert len(set(tokens)) > 40
        assert "\ufffd" not in final["full_completion"]


def test_a_prompt_in_small_chunks_gives_the_same_tokens(fp16):
    prompt = "".join(LONG_PROMPT.format(i) for i in range(40))
    whole, final = fp16.run(prompt, 32)
    job = fp16.job(prompt, 32)
    chunked, _ = run_jobs(fp16.generator(max_chunk_size=256), [job])[0]
    assert final["prompt_tokens"] > 600
    assert chunked == whole


def test_the_moe_model_generates_and_is_walked_as_experts(moe):
    tokens, _ = moe.run("Hello", 16)
    assert tokens == moe.run("Hello", 16)[0]
    experts = [m for m in moe.model if m.get_name() == "BlockSparseMLP"]
    assert [(m.num_experts, m.num_experts_per_tok) for m in experts] == [(4, 2)] * 2
    assert all(len(m.gates) == len(m.ups) == len(m.downs) == 4 for m in experts)


def test_loading_reports_every_module_in_order(fp16):
    n_modules = len(fp16.model.modules)
    assert fp16.progress == [(i, n_modules) for i in range(n_modules + 1)]


def test_the_file_and_the_loaded_model_agree_on_bits_per_weight(exl3):
    stored = exl3.config.config_dict["quantization_config"]
    bits, head_bits, _ = exl3.model.get_storage_info()
    # What is stored beside the trellis is half a bit or so in a model this small
    assert 0 < bits - stored["bits"] < 0.6
    assert 0 < head_bits - stored["head_bits"] < 0.3
    assert 4.0 <= stored["bits"] <= 4.1


# --- cache, batching, drafting -------------------------------------------------------------------


def test_a_repeated_prompt_is_served_from_the_cache(fp16):
    generator = fp16.generator()
    prompt = "".join(LONG_PROMPT.format(i) for i in range(60))
    first, second = (run_jobs(generator, [fp16.job(prompt, 8)])[0] for _ in range(2))
    assert first[0] == second[0]
    assert first[1]["cached_tokens"] == 0
    assert second[1]["cached_tokens"] == second[1]["prompt_tokens"] - 1


def test_two_jobs_at_once_equal_each_alone(fp16):
    alone = [fp16.run(prompt, 64)[0] for prompt in PROMPTS]
    jobs = [fp16.job(prompt, 64) for prompt in PROMPTS]
    together = [tokens for tokens, _ in run_jobs(fp16.generator(), jobs)]
    assert together == alone


def test_ngram_drafting_changes_the_counters_and_not_the_text(fp16):
    prompt = "The ferry left the harbour. " * 10
    expected, _ = fp16.run(prompt, 200)
    tokens, final = run_jobs(fp16.generator(ngram_match_min=1), [fp16.job(prompt, 200)])[0]
    assert tokens == expected
    assert final["accepted_draft_tokens"] > 0
    assert final["rejected_draft_tokens"] > 0


def test_a_draft_model_with_the_same_weights_drafts_nothing_wrong(fp16, tmp_path):
    """A copy, because exllamav3 takes the model's own directory for a request to draft with MTP."""
    expected, _ = fp16.run("Hello, world!", 64)
    copy = shutil.copytree(tiny_model.cached("fp16"), tmp_path / "draft")
    drafting = Loaded("fp16", "-dm", str(copy), "-ndt", "3")
    tokens, final = drafting.run("Hello, world!", 64)
    assert tokens == expected
    assert (final["accepted_draft_tokens"], final["rejected_draft_tokens"]) == (48, 0)


def test_cancelling_a_job_midway_frees_its_pages(fp16):
    generator = fp16.generator()
    cancelled, other = fp16.job(LONG_PROMPT * 20, 500), fp16.job("Hello", 40)
    generator.enqueue([cancelled, other])
    for _ in range(8):
        generator.iterate()
    assert cancelled in generator.active_jobs
    generator.cancel(cancelled)
    generator.pagetable.validate_pagetable(generator.active_jobs)
    while generator.num_remaining_jobs():
        assert all(result["job"] is other for result in generator.iterate())
    assert not generator.pagetable.referenced_pages
    generator.pagetable.validate_pagetable([])


def test_a_long_answer_that_is_requeued_goes_on_as_if_nothing_happened(fp16):
    expected, _ = fp16.run("Where are we going?", 600)
    tokens, final = fp16.run("Where are we going?", 600, max_rq_tokens=256)
    assert tokens == expected
    assert final["new_tokens"] == 600


def test_defragmenting_the_cache_keeps_its_contents(fp16):
    """Three conversations grow in turns, so their pages alternate until they are put in order."""
    generator = fp16.generator()
    prompts = ["", "", ""]
    for turn in range(3):
        for i in range(len(prompts)):
            prompts[i] += "".join(LONG_PROMPT.format(i * k + turn) for k in range(16))
            run_jobs(generator, [fp16.job(prompts[i], 1)])
    before = [page.page_index for page in generator.pagetable.all_pages]
    generator.pagetable.last_defrag_serial = -(10**9)
    with torch.inference_mode():  # the pages were written in this mode
        generator.pagetable.defrag()
    assert [page.page_index for page in generator.pagetable.all_pages] != before
    moved = [run_jobs(generator, [fp16.job(prompt, 16)])[0] for prompt in prompts]
    for prompt, (tokens, final) in zip(prompts, moved, strict=True):
        assert final["cached_tokens"] >= final["prompt_tokens"] // 256 * 256 > 0
        assert tokens == fp16.run(prompt, 16)[0]


@given(st.lists(st.integers(0, 3), max_size=40), st.data())
def test_the_suffix_automaton_finds_the_longest_suffix_seen_before(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    sam = cpu_exllamav3.BC_SAM()
    sam.accept_tensor(torch.tensor([ids[:cut]], dtype=torch.long))
    begin, end = sam.accept_tensor(torch.tensor([ids], dtype=torch.long))
    assert sam.length() == len(ids)
    if cut == len(ids):
        return  # nothing new: the kernel answers (-1, -1) too
    seen = [
        (b - a, a, b)
        for b in range(1, len(ids))
        for a in range(b)
        if ids[a:b] == ids[len(ids) - (b - a) :]
    ]
    longest = max((length for length, _, _ in seen), default=0)
    first = min((b for length, _, b in seen if length == longest), default=None)
    assert (begin, end) == ((first - longest, first) if longest else (-1, -1))


# --- EXL3 storage --------------------------------------------------------------------------------


def decode_tile(words, bits):
    """Decodes one 256-weight tile bit by bit: its 16 * `bits` uint16 words -> 16 x 16 floats.

    mul1 codebook. The description is in exllamav3_ext/quant/frac.cu: a ring of bits, most
    significant first in 32-bit words, where weight i is the 16 bits that end at its own new bits.
    """
    pairs = [words[i + 1] << 16 | words[i] for i in range(0, len(words), 2)]
    ring = "".join(f"{pair:032b}" for pair in pairs)
    tile = [[0.0] * 16 for _ in range(16)]
    end = 0
    for i in range(256):
        end += int(bits) + (i % 2 if bits != int(bits) else 0)
        state = int("".join(ring[(end - 16 + j) % len(ring)] for j in range(16)), 2)
        total = sum((state * 0x83DCD12D % 2**32).to_bytes(4, "little"))
        lane, slot = divmod(i, 8)
        row = lane % 4 * 2 + slot % 2 + (8 if slot & 2 else 0)
        column = lane // 4 + (8 if slot & 4 else 0)
        tile[row][column] = (total - 510) / 147.7
    return torch.tensor(tile)


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8])
def test_a_trellis_of_any_bitrate_decodes_to_its_definition(bits):
    rng = np.random.RandomState(int(bits * 2))
    words = rng.randint(0, 1 << 16, size=(2, 8, int(16 * bits)))
    packed = torch.from_numpy(words.astype(np.uint16).view(np.int16))
    whole = torch.empty(32, 128, dtype=torch.half)
    cpu_exllamav3.reconstruct(whole, packed, bits, False, True)
    expected = [torch.cat([decode_tile(t.tolist(), bits) for t in row], 1) for row in words]
    torch.testing.assert_close(whole.float(), torch.cat(expected), atol=0.01, rtol=0.005)
    part = torch.empty(32, 48, dtype=torch.half)
    cpu_exllamav3.reconstruct_slice(part, packed, bits, False, True, 32)
    assert torch.equal(part, whole[:, 32:80])


# --- sampling ------------------------------------------------------------------------------------


def test_penalties_change_the_text_and_forbid_repetition_when_huge(fp16):
    plain, _ = fp16.run("Hello, world!", 100)
    assert len(set(plain)) < 100
    for options in ({"rep_p": 1.5}, {"freq_p": 100.0}, {"pres_p": 100.0}):
        sampler = ComboSampler(temperature=0.0, **options)
        tokens, _ = fp16.run("Hello, world!", 100, sampler=sampler)
        assert tokens != plain
        assert len(set(tokens)) == 100 or "rep_p" in options


def test_penalties_fade_out_over_the_decay_range():
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    past, out = torch.tensor([[2, 3, 1, 0]]), torch.empty(1, 4)
    cpu_exllamav3.apply_rep_pens(logits, out, past, 2.0, 1, 2)
    torch.testing.assert_close(out, torch.tensor([[1.0, -3.0, 2.0, 2.0]]))
    cpu_exllamav3.apply_pres_freq_pens(logits, out, past, 1.0, 0.5, 4, 0)
    torch.testing.assert_close(out, logits - 1.5)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.sets(st.integers(0, 4)))
def test_dry_penalizes_what_would_continue_a_repetition(ids, blocked):
    breakers = torch.tensor([token in blocked for token in range(5)])
    out = torch.empty(1, 5)
    past = torch.tensor([ids])
    options = (0.5, 2.0, 2, 0, 10, 2048)
    cpu_exllamav3.dry_penalty(torch.zeros(1, 5), out, past, breakers, None, None, *options)
    expected = torch.zeros(1, 5)
    tail = next((i for i, token in enumerate(ids[::-1]) if token in blocked), len(ids))
    for token in set(range(5)) - blocked:
        matches = [
            n
            for n in range(2, min(tail, len(ids) - 1) + 1)
            for at in range(n, len(ids))
            if ids[at] == token and ids[at - n : at] == ids[len(ids) - n :]
        ]
        if matches:
            expected[0, token] = -0.5 * 2.0 ** min(max(matches) - 2, 10)
    torch.testing.assert_close(out, expected)


def test_a_seed_repeats_a_text_and_another_seed_does_not(fp16):
    sampler = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    one, same, other = (
        fp16.run("Hello", 48, sampler=ComboSampler(**sampler), seed=seed)[0] for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_sampling_draws_tokens_as_often_as_their_probability_says():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).half()
    sampler = ComboSampler(temperature=1.0)
    drawn = torch.stack([sampler.forward(logits[None], None, seed) for seed in range(4000)])
    frequency = drawn.flatten().bincount(minlength=4) / 4000
    assert (frequency - logits[0].float().softmax(-1)).abs().max() < 0.025


def test_every_sampling_step_runs_on_the_stand_ins(fp16):
    samplers = (
        ComboSampler(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, temp_last=True),
        ComboSampler(temperature=1.0, dry_multiplier=0.8, rep_p=1.1, pres_p=0.2, freq_p=0.1),
        ComboSampler(temperature=1.0, adaptive_target=0.5),
        AdaptivePSampler(),
        CustomSampler([SS_XTC(0.5, 0.1, tokenizer=fp16.tokenizer), SS_Sample()]),
    )
    for sampler in samplers:
        tokens, _ = fp16.run("Hello", 24, sampler=sampler, seed=7)
        assert len(tokens) == 24


def test_a_logit_bias_decides_the_token_even_inside_a_character(fp16):
    """Three biased bytes in turn make one character, which arrives when it is complete."""
    generator = fp16.generator()
    job = fp16.job("Hello", 3)
    generator.enqueue(job)
    texts = []
    for byte in "€".encode():
        job.set_sampler(ComboSampler(temperature=0.0, logit_bias={byte: 100.0}))
        texts += [r.get("text") for r in generator.iterate() if r["stage"] == "streaming"]
    assert texts == [None, None, "€"]


def test_probabilities_are_the_softmax_of_the_logits(fp16):
    generator = fp16.generator()
    options = {"return_probs": True, "return_logits": True, "return_top_tokens": 5}
    generator.enqueue(fp16.job("Hello", 4, **options))
    results = []
    while generator.num_remaining_jobs():
        results += [r for r in generator.iterate() if "token_ids" in r]
    for result in results:
        probs = result["logits"].float().softmax(-1)
        best = probs.topk(5)
        torch.testing.assert_close(result["top_k_probs"], best.values)
        torch.testing.assert_close(result["token_probs"], best.values[..., 0])
        assert result["top_k_tokens"][0, 0, 0] == result["token_ids"][0, 0]


# --- filters and strings -------------------------------------------------------------------------


def test_a_json_schema_is_obeyed(fp16):
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city", "count"],
        "additionalProperties": False,
    }
    for sampler in (ArgmaxSampler(), ComboSampler(temperature=1.5)):
        grammar = LLGuidanceFilter(fp16.tokenizer, json_schema=schema, eos_after_completed=True)
        stops = fp16.config.eos_token_id_list
        options = {"filters": [grammar], "sampler": sampler, "seed": 3, "stop_conditions": stops}
        _, final = fp16.run("Answer in JSON: ", 300, **options)
        assert final["eos_reason"] in ("end_filter", "stop_token")
        answer = json.loads(final["full_completion"])
        assert answer.keys() == {"city", "count"}
        assert answer["count"] in range(10)


def test_stop_and_banned_strings_work(fp16):
    _, plain = fp16.run("Hello, world!", 40)
    text = plain["full_completion"]
    _, final = fp16.run("Hello, world!", 40, stop_conditions=[text[30:36]])
    assert (final["eos_reason"], final["eos_triggering_string"]) == ("stop_string", text[30:36])
    assert final["full_completion"] == text[: text.find(text[30:36])]
    _, final = fp16.run("Hello, world!", 40, banned_strings=[text[10:16]])
    assert text[10:16].lower() not in final["full_completion"].lower()


def test_injected_text_appears_and_generation_goes_on(fp16):
    generator = fp16.generator()
    job = fp16.job("Hello", 20)
    generator.enqueue(job)
    for _ in range(3):
        generator.iterate()
    job.constrain_output_now(" the lighthouse")
    _, final = run_until_done(generator)
    assert " the lighthouse" in final["full_completion"]
    assert final["new_tokens"] == 20


def run_until_done(generator):
    """Iterates until the only job ends. Returns (streaming results, final result)."""
    results = []
    while generator.num_remaining_jobs():
        results += [r for r in generator.iterate() if r["stage"] == "streaming"]
    return results, results[-1]


def utf32(strings):
    """Packs strings as exllamav3 hands them to the matcher: (offsets, buffer)."""
    encoded = [s.encode("utf-32-le") for s in strings]
    offsets = np.cumsum([0] + [len(e) for e in encoded]).astype(np.int32)
    return np.frombuffer(offsets, dtype=np.uint8), b"".join(encoded)


@given(st.text("ab€", max_size=8), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1))
def test_string_matching_is_what_its_definition_says(text, strings):
    full = min((text.find(s) for s in strings if s in text), default=None)
    starts = [
        i for i in range(len(text)) for s in strings if s.startswith(text[i:]) and s != text[i:]
    ]
    partial = min(starts, default=None)
    expected = -1 if full is None else full
    if partial is not None and (full is None or partial < full):
        expected = -2
    match = cpu_exllamav3.partial_strings_match(text.encode("utf-32-le"), *utf32(strings))
    assert match == expected


# --- tokenizer, template, extension --------------------------------------------------------------


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = hf_tokenizer()
    tokenizer.encode_special_tokens = True  # so that tags in the text are text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def hf_tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_model.cached("fp16") / "tokenizer.json"))


def test_token_ids_below_256_are_bytes_and_tags_are_single_tokens(fp16):
    assert fp16.tokenizer.actual_vocab_size == fp16.config.vocab_size == tiny_model.VOCAB
    pieces = fp16.tokenizer.get_id_to_piece_list()
    assert [pieces[byte] for byte in b"az \n"] == ["a", "z", " ", "\n"]
    for text, _ in tiny_model.ADDED_TOKENS:
        ids = fp16.tokenizer.encode(text, encode_special_tokens=True)[0].tolist()
        assert ids == [tiny_model.TOKEN_ID[text]]
    stops = [tiny_model.TOKEN_ID["<|im_end|>"], tiny_model.TOKEN_ID["<|eos|>"]]
    assert fp16.config.eos_token_id_list == stops


def test_the_chat_template_shows_roles_tools_thoughts_and_calls():
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps  # as transformers does; jinja's own escapes HTML
    template = environment.from_string(tiny_model.CHAT_TEMPLATE)
    call = {"function": {"name": "get_weather", "arguments": {"location": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    prompt = template.render(
        messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=True
    )
    system, user, assistant, tool, start = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nFunctions")
    assert '"name": "get_weather"' in system
    assert user == "user\nRain?<|im_end|>\n"
    assert assistant == (
        "assistant\n<think>\nAsk.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call><|im_end|>\n'
    )
    assert tool == "user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    assert start == "assistant\n<think>\n"
    plain = template.render(messages=messages[1:2], add_generation_prompt=True)
    assert plain == "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"


def test_a_kernel_without_a_stand_in_says_so_when_it_is_called():
    from exllamav3.ext import exllamav3_ext

    kernel = exllamav3_ext.exl3_mgemm
    with pytest.raises(NotImplementedError, match="exl3_mgemm"):
        kernel()
