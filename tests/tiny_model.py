"""Makers of tiny, deterministic model directories for tests, about one megabyte each.

    python tests/tiny_model.py KIND OUTDIR        KIND: fp16, exl3, exl3_moe

- `fp16`: a two-layer LlamaForCausalLM in float16. `hf_to_gguf.py` turns it into a GGUF, so that a
  real llama-server can serve the same weights.
- `exl3`: the same architecture with its linear layers in EXL3 storage (trellis, suh, svh, mul1) at
  mixed bitrates, with `quantization_config` written as exllamav3's converter writes it.
- `exl3_moe`: a Qwen3MoeForCausalLM with four experts, two of them used, in EXL3 storage.

All kinds share one byte-level BPE tokenizer (token id b < 256 is the byte b) and one ChatML
template with Hermes-style tool calls. The weights are random: the text is nonsense, but it is the
same nonsense everywhere. Only streams that never change are used (numpy's legacy RandomState, our
own BPE trainer), so a recording made from one directory stays valid for every later one.

Four properties are arranged, because a random model lacks them: greedy text is valid UTF-8 without
control characters; no special token ever wins the argmax, so greedy text ends where the caller
says; text under a JSON grammar comes to its end; and rounding disturbs the logits little, so that
two engines which round differently nearly always choose the same token.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

KINDS = ("fp16", "exl3", "exl3_moe")

HIDDEN = 128  # EXL3 works in blocks of 128 channels, so every width below is a multiple of it
LAYERS = 2
HEAD_DIM = 32
Q_HEADS = 8
KV_HEADS = 4
INTERMEDIATE = 256
EXPERTS = 4
VOCAB = 1024
MAX_POSITION = 32768
SEED = 20261

# (text, special): special tokens are invisible in decoded text, the others are visible, as the
# think and tool tags of Qwen3 are. Ids follow the BPE vocabulary in this order.
ADDED_TOKENS = (
    ("<|bos|>", True),
    ("<|eos|>", True),
    ("<|pad|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|fim_prefix|>", True),
    ("<|fim_suffix|>", True),
    ("<|fim_middle|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
)
FIRST_ADDED = VOCAB - len(ADDED_TOKENS)
TOKEN_ID = {text: FIRST_ADDED + i for i, (text, _) in enumerate(ADDED_TOKENS)}

MUL1_MULTIPLIER = 0x83DCD12D  # marks the "mul1" codebook, see exllamav3 exl3_lib/quantize.py
EXL3_VERSION = "1.6.5"

TRAINING_TEXT = """\
The ferry left the harbour at seven in the morning, and nobody on the pier could say whether it
would return before dark. Rain had fallen all night. A boy with a red umbrella counted the gulls,
lost count, and started again from one. "Where are we going?" asked his sister. "Across the water,"
he answered, "to the island with the lighthouse." She thought about this for a while. Then she
laughed, because the lighthouse was only a picture in a book, and books are not places.

There are many ways to answer a question. You can say what you know, you can say what you do not
know, or you can ask another question. The user asked about the weather in Paris and in Berlin; the
assistant called the tool, waited for the result, and wrote a short summary. It was sunny, with a
temperature of 21 degrees. Please give me the name of the city, the current time, and the number of
people who live there. I think the first one is right, but the second might be better. Let me
explain: when the system starts, it reads the message, looks for a function, and returns a value.

# Notes
1. Open the file, read every line, and close it again.
2. Never trust an input you did not check yourself.
3. Write tests first; they are cheaper than excuses.

- item one, with a comma
- item two: a colon, a dash - and a *star*
- item three (in parentheses), 100% done!

```python
def fibonacci(n: int) -> int:
    # The sum of the previous two numbers.
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


class Counter:
    def __init__(self, start=0):
        self.value = start

    def increment(self, step=1):
        self.value += step
        return self.value


if __name__ == "__main__":
    print("Hello, world!", fibonacci(10), [x * x for x in range(5) if x != 3])
```

{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius", "days": 3}}
{"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}},
 "required": ["city", "count"], "ok": true, "missing": false, "nothing": null, "price": 12.50}

<p class="note">Tom &amp; Jerry</p> https://example.org/index.html?query=a+b&page=2#top
SELECT id, title FROM books WHERE year > 1984 AND author LIKE 'O%' ORDER BY title;

Das Wetter ist schön; die Straße führt über den Fluß. Où est la bibliothèque? Déjà vu, voilà!
¿Dónde está el niño? Привет, мир. Ελληνικά. ½ € — “quotes” … 🙂 🚀
こんにちは世界。日本語のテキスト。
"""

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content if part.type == 'text' -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro open(role) -%}
  {{- '<|im_start|>' + role + '\\n' -}}
{%- endmacro -%}
{%- macro close() -%}
  {{- '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set first = 0 -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set first = 1 -%}
{%- endif -%}
{%- if tools or first -%}
  {{- open('system') -}}
  {%- if first -%}
    {{- text_of(messages[0].content) -}}
  {%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n' if first else '' -}}
    {{- 'Functions you may call, one JSON description per line:\\n<tools>' -}}
    {%- for tool in tools -%}
      {{- '\\n' -}}{{- tool | tojson -}}
    {%- endfor -%}
    {{- '\\n</tools>\\nTo call a function, answer with\\n<tool_call>\\n' -}}
    {{- '{"name": <function name>, "arguments": <arguments as JSON object>}' -}}
    {{- '\\n</tool_call>' -}}
  {%- endif -%}
  {{- close() -}}
{%- endif -%}
{%- for message in messages[first:] -%}
  {%- if message.role == 'assistant' -%}
    {{- open('assistant') -}}
    {%- if message.reasoning_content -%}
      {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function else call -%}
      {{- '\\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- close() -}}
  {%- elif message.role == 'tool' -%}
    {{- open('user') + '<tool_response>\\n' -}}
    {{- text_of(message.content) -}}
    {{- '\\n</tool_response>' + close() -}}
  {%- else -%}
    {{- open(message.role) -}}
    {{- text_of(message.content) -}}
    {{- close() -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- open('assistant') -}}
  {%- if enable_thinking is defined and enable_thinking -%}
    {{- '<think>\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


# --- tokenizer -----------------------------------------------------------------------------------


def byte_alphabet():
    """Returns the 256 characters that stand for the bytes 0..255 in a byte-level vocabulary.

    GPT-2's rule: printable Latin-1 characters stand for themselves, the others are moved to 256
    and up in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def train_bpe(text, n_merges):
    """Returns `n_merges` merges, a list of (left, right) pieces, most frequent pair first.

    Ties go to the smaller pair, so the result depends on nothing but the text. The text is cut
    into words as GPT-2 does it; the words are in byte-level characters.
    """
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(word for word, _ in splitter.pre_tokenize_str(text))
    counted = [(list(word), count) for word, count in sorted(words.items())]
    merges = []
    while len(merges) < n_merges:
        pairs = Counter()
        for pieces, count in counted:
            for pair in pairwise(pieces):
                pairs[pair] += count
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        for pieces, _ in counted:
            i = 0
            while i + 1 < len(pieces):
                if pieces[i] == left and pieces[i + 1] == right:
                    pieces[i : i + 2] = [left + right]
                i += 1
    return merges


def bpe_pieces(merges):
    """Returns the BPE vocabulary as byte-level strings, in id order."""
    return byte_alphabet() + [left + right for left, right in merges]


def added_token(text, special):
    """Returns the description of an added token that tokenizer.json and its config share."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": text, **flags, "special": special}


def write_tokenizer(directory, merges):
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": TOKEN_ID[text], **added_token(text, special)} for text, special in ADDED_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(bpe_pieces(merges))},
            "merges": [[left, right] for left, right in merges],
        },
    }
    config = {
        "added_tokens_decoder": {
            str(TOKEN_ID[text]): added_token(text, special) for text, special in ADDED_TOKENS
        },
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


# --- weights -------------------------------------------------------------------------------------


# Classes of output tokens. DEAD: never in greedy text. SPACE: whitespace alone, rare, because JSON
# grammars allow it between any two tokens and a random model would never move on. QUOTE: begins
# with a double quote and is frequent, so that JSON strings end before long.
DEAD, SPACE, PLAIN, QUOTE = range(4)


def head_classes(merges):
    """Returns the class of every token, int array [VOCAB].

    Dead are added tokens, pieces that are not valid UTF-8 by themselves, and pieces with control
    characters other than a newline.
    """
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}
    classes = np.full(VOCAB, DEAD)
    for i, piece in enumerate(bpe_pieces(merges)):
        try:
            text = bytes(alphabet[char] for char in piece).decode("utf-8")
        except UnicodeDecodeError:
            continue
        if all(char.isprintable() or char == "\n" for char in text):
            classes[i] = SPACE if text.isspace() else QUOTE if text.startswith('"') else PLAIN
    return classes


def head_rows(rng):
    """Returns output rows, float array [VOCAB, HIDDEN], all of length one and heavy-tailed.

    A few large entries per row make a logit depend on a few channels, so that the best logit
    stands out more than it would among sums of many small terms.
    """
    rows = rng.standard_normal((VOCAB, HIDDEN)) ** 5
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def layer_shapes(prefix):
    """Yields (name, out_features, in_features, gain) of the linears of one dense Llama layer.

    `gain` is the standard deviation of the output for an input of unit variance. What a layer adds
    is about as large as the embeddings: enough that the text depends on all of the prompt, little
    enough that the rounding inside the layers, where engines differ, stays small in the logits.
    """
    q_width, kv_width = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield f"{prefix}.self_attn.q_proj", q_width, HIDDEN, 1.25
    yield f"{prefix}.self_attn.k_proj", kv_width, HIDDEN, 1.25
    yield f"{prefix}.self_attn.v_proj", kv_width, HIDDEN, 1.0
    yield f"{prefix}.self_attn.o_proj", HIDDEN, q_width, 1.25
    yield f"{prefix}.mlp.gate_proj", INTERMEDIATE, HIDDEN, 1.0
    yield f"{prefix}.mlp.up_proj", INTERMEDIATE, HIDDEN, 1.0
    yield f"{prefix}.mlp.down_proj", HIDDEN, INTERMEDIATE, 0.5


HEAD_GAIN = 2.8  # standard deviation of the logits that are in play

# Channel 0 is a constant: every embedding has it, no layer of the fp16 model reads or writes it.
# The output layer turns it into an offset by class, about twice the number here. The best logit
# comes out at about 4: positive, as repetition penalties expect it, and small, where halves are
# fine.
CONSTANT = 2.5
HEAD_OFFSETS = np.array([-12.0, -5.0, -2.5, -1.8])

# EXL3 weights cannot be set one by one; there the output layer has a bias by class.
HEAD_BIASES = np.array([-25.0, -5.0, 0.0, 2.0])


def norm_and_embedding_tensors(rng):
    """Returns the tensors that no kind quantizes: token embeddings and norms, float16."""
    norms = [f"model.layers.{i}.{norm}_layernorm" for i in range(LAYERS) for norm in NORMS]
    tensors = {f"{name}.weight": np.ones(HIDDEN) for name in [*norms, "model.norm"]}
    tensors["model.embed_tokens.weight"] = rng.standard_normal((VOCAB, HIDDEN))
    return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}


NORMS = ("input", "post_attention")


def fp16_tensors(merges):
    """Returns the tensors of the dense float16 model, `name.weight` [out, in]."""
    rng = np.random.RandomState(SEED)
    tensors = norm_and_embedding_tensors(rng)
    tensors["model.embed_tokens.weight"][:, 0] = CONSTANT
    for layer in range(LAYERS):
        for name, n_out, n_in, gain in layer_shapes(f"model.layers.{layer}"):
            weight = rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)
            if name.endswith(("o_proj", "down_proj")):
                weight[0] = 0.0
            else:
                weight[:, 0] = 0.0
            tensors[f"{name}.weight"] = weight.astype(np.float16)
    classes = head_classes(merges)
    head = head_rows(rng) * HEAD_GAIN * (classes != DEAD)[:, None]
    head[:, 0] = HEAD_OFFSETS[classes]
    tensors["lm_head.weight"] = head.astype(np.float16)
    return tensors


def exl3_linear(rng, name, n_out, n_in, gain, bits):
    """Returns the EXL3 tensors of one linear with random contents.

    A trellis is a bit stream, and any bit stream decodes to codebook values of about unit variance,
    so random bits are random weights; nothing has to be quantized. The weight is
    `diag(suh) H decode(trellis) H diag(svh)` with the Hadamard H in blocks of 128. `bits` is the
    bitrate, 1..8 or x.5.
    """
    words = int(16 * bits)
    trellis = rng.randint(0, 1 << 16, size=(n_in // 16, n_out // 16, words))
    signs = rng.choice([-1.0, 1.0], size=n_in)
    return {
        f"{name}.trellis": trellis.astype(np.uint16).view(np.int16),
        f"{name}.suh": signs.astype(np.float16),
        f"{name}.svh": np.full(n_out, gain / np.sqrt(n_in), np.float16),
        f"{name}.mul1": np.array(MUL1_MULTIPLIER, dtype=np.uint32).view(np.int32),
    }


def exl3_bits(name):
    """Returns the bitrate of a linear: a 4-bit model with exceptions, as real ones have."""
    if name == "lm_head":
        return 6
    if name.endswith("layers.1.mlp.down_proj"):
        return 5
    return 3.5 if name.endswith("v_proj") else 4


def exl3_head(rng, merges):
    """Returns the EXL3 tensors of the output layer."""
    bias = HEAD_BIASES[head_classes(merges)].astype(np.float16)
    linear = exl3_linear(rng, "lm_head", VOCAB, HIDDEN, HEAD_GAIN, exl3_bits("lm_head"))
    return {**linear, "lm_head.bias": bias}


def exl3_tensors(merges):
    """Returns the tensors of the dense EXL3 model."""
    rng = np.random.RandomState(SEED + 1)
    tensors = norm_and_embedding_tensors(rng)
    for layer in range(LAYERS):
        for name, n_out, n_in, gain in layer_shapes(f"model.layers.{layer}"):
            tensors.update(exl3_linear(rng, name, n_out, n_in, gain, exl3_bits(name)))
    tensors.update(exl3_head(rng, merges))
    return tensors


def moe_tensors(merges):
    """Returns the tensors of the EXL3 mixture-of-experts model; the router stays float16."""
    rng = np.random.RandomState(SEED + 2)
    tensors = norm_and_embedding_tensors(rng)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = np.full(HEAD_DIM, 1.5, np.float16)
        router = rng.standard_normal((EXPERTS, HIDDEN)) * 2.0 / np.sqrt(HIDDEN)
        tensors[f"{prefix}.mlp.gate.weight"] = router.astype(np.float16)
        for name, n_out, n_in, gain in layer_shapes(prefix):
            parent, _, leaf = name.rpartition(".")
            copies = [f"{parent}.experts.{i}.{leaf}" for i in range(EXPERTS)]
            for target in copies if parent.endswith(".mlp") else [name]:
                tensors.update(exl3_linear(rng, target, n_out, n_in, gain, 4))
    tensors.update(exl3_head(rng, merges))
    return tensors


# --- configuration -------------------------------------------------------------------------------


def base_config():
    """Returns the config.json fields that all kinds share."""
    return {
        "bos_token_id": TOKEN_ID["<|bos|>"],
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|pad|>"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_POSITION,
        "num_attention_heads": Q_HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
    }


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": INTERMEDIATE,
    "norm_topk_prob": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
}

DTYPE_NAMES = {"float16": "torch.float16", "int16": "torch.int16", "int32": "torch.int32"}


def tensor_storage(tensors):
    """Returns `tensor_storage` of quantization_config.json: what is stored, by module."""
    storage = {}
    for key, tensor in tensors.items():
        module, _, _ = key.rpartition(".")
        entry = storage.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][key] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": DTYPE_NAMES[tensor.dtype.name],
        }
        if key.endswith(".trellis"):
            bits = tensor.shape[-1] / 16
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = int(bits) if bits.is_integer() else bits
            entry["mul1_multiplier"] = MUL1_MULTIPLIER
    return storage


def quantization_config(tensors):
    """Returns `quantization_config` of config.json; `bits` is the mean without the head."""
    trellises = {k: t for k, t in tensors.items() if k.endswith(".trellis")}
    n_bits = n_weights = 0
    for key, trellis in trellises.items():
        if not key.startswith("lm_head"):
            n_bits += trellis.size * 16
            n_weights += trellis.shape[0] * trellis.shape[1] * 256
    return {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": round(n_bits / n_weights, 2),
        "head_bits": exl3_bits("lm_head"),
        "calibration": {"rows": 250, "cols": 2048},
        "out_scales": "auto",
        "codebook": "mul1",
    }


def write_json(path, value):
    """Writes JSON the way the converters do, in UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- directories ---------------------------------------------------------------------------------


def make(kind, outdir):
    """Writes a model of `kind` into `outdir`, which is made when missing. Returns the path."""
    directory = Path(outdir)
    directory.mkdir(parents=True, exist_ok=True)
    merges = train_bpe(TRAINING_TEXT, FIRST_ADDED - 256)
    tensor_maker, architecture = {
        "fp16": (fp16_tensors, LLAMA),
        "exl3": (exl3_tensors, LLAMA),
        "exl3_moe": (moe_tensors, QWEN3_MOE),
    }[kind]
    tensors = tensor_maker(merges)
    config = {**architecture, **base_config()}
    if kind != "fp16":
        config["quantization_config"] = quantization_config(tensors)
        details = {**config["quantization_config"], "tensor_storage": tensor_storage(tensors)}
        write_json(directory / "quantization_config.json", details)
    write_json(directory / "config.json", config)
    stop_ids = [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|eos|>"]]
    generation = {"bos_token_id": TOKEN_ID["<|bos|>"], "eos_token_id": stop_ids}
    write_json(directory / "generation_config.json", generation)
    write_tokenizer(directory, merges)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def cached(kind):
    """Returns the path of a model of `kind`, making it on the first call on this machine.

    The cache directory is the user's own and named after a hash of this file, so an edit here makes
    new models. Safe with parallel processes: each writes beside the target and renames; who comes
    second finds the target there and drops its own copy. `EXL3_SERVE_TEST_CACHE` moves the cache.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    default = Path(tempfile.gettempdir()) / f"exl3-serve-tests-{user}"
    root = Path(os.environ.get("EXL3_SERVE_TEST_CACHE") or default)
    target = root / digest / kind
    if not (target / "model.safetensors").exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=target.parent))
        try:
            make(kind, scratch)
            scratch.rename(target)
        except OSError:
            if not (target / "model.safetensors").exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: tiny_model.py {{{','.join(KINDS)}}} OUTDIR")
    print(make(sys.argv[1], sys.argv[2]))
