"""Runs the real exllamav3 on the CPU, for tests: plain-torch stand-ins for its CUDA kernels.

`install()` must be called before anything imports exllamav3. Afterwards `import exllamav3` works in
any module of the process, and neither the server nor exllamav3's own Python code can tell.

Replaced, and why:

- `exllamav3.ext`, the compiled extension: a module whose `exllamav3_ext` holds the functions and
  classes of this file. Each has the name, the argument order and the result of the kernel of
  exllamav3 1.6.5 that it stands for; where a kernel rounds to half, so does the stand-in. A kernel
  that has no stand-in raises NotImplementedError when it is called, naming itself.
- attention: a torch function put first in `attention_fn.dispatch.attn_fns`. It reads and writes the
  real paged cache through the real block tables. (The originals are Triton kernels.)
- `LinearFP16.forward`: torch's half matmul is slow on a CPU, and what it makes of a row depends on
  how many other rows there are. Here, as in every stand-in that sums, the sum is taken in float64
  and rounded once. A row then does not depend on its neighbours, and a job in a batch, a drafted
  token or a prompt in chunks gives exactly the tokens of the plain run.
- `Model._load_autosplit`: splits by free VRAM. Here every module goes to the CPU; the load callback
  is called as in the original.
- `Model.warmup`: compiles and tunes kernels. Here there is nothing to warm.
- the safetensors loader's default method is its own `"python"` instead of the C++ reader.
- `InferParams.no_reconstruct` is set: it turns off the paths that hand device pointers to kernels.
- `BlockSparseMLP.load` finishes loading on CUDA devices only; here it does so on the CPU too.
- torch: `pin_memory` is dropped and `torch.cuda.synchronize` does nothing, as there is no device.
- environment: `EXL3_FUSED_SAMPLER=0` and `EXL3_BC_ATTN=0` select exllamav3's own step-by-step
  sampler and attention block; CUDA devices are hidden.

Real: everything else. Config, tokenizer, module tree, cache, page table, generator, jobs, filters,
every sampling step, stop and banned strings, `model_init.add_args` and `model_init.init`.

Not the same as on a GPU: the random numbers (torch's instead of Philox, so a seed gives another
text, though always the same one), the last bit of float sums, and speed. Out of scope: recurrent
and vision models, quantized caches (`-cq`), tensor parallelism, CPU and disk cache tiers.
"""

import functools
import itertools
import math
import os
import sys
import types

import numpy as np
import torch

HALF_MAX = 65504.0
HADAMARD = 128  # EXL3 rotates in blocks of 128 channels
PAGE = 256


# --- norms, rotary embedding, activations, matrix products ---------------------------------------


def _inverse_rms(x, eps):
    """Returns 1 / RMS of the last dimension, float32 [..., 1]."""
    return torch.rsqrt(x.double().square().mean(dim=-1, keepdim=True) + eps).float()


def _normalize(x, weight, eps, bias, scale):
    """RMS norm over the last dimension of a float32 x; `weight` may be None. Returns float32."""
    norm = _inverse_rms(x, eps) * scale
    if weight is None:
        return x * norm
    weight = weight.float()
    return x * (weight if bias == 0.0 else weight + bias) * norm


def _finite(x):
    """Widens to float32; the kernels read an infinite half as the largest finite one."""
    return x.float().clamp(-HALF_MAX, HALF_MAX) if x.dtype == torch.half else x


def rms_norm(x, w, y, eps, bias, scale, span_heads=False, add_residual=False, groups=1):
    """Writes the norm of x to y, or adds it to y; grouped weights cycle over the rows."""
    rows, out = _finite(x), y
    if span_heads:
        rows, out = rows.flatten(-2), y.flatten(-2)
    if groups > 1:
        w = w.view(groups, -1).repeat(rows.shape[0] // groups, 1)
    result = _normalize(rows, w, eps, bias, scale).view(out.shape)
    out.copy_(out + result if add_residual else result)


def rms_norm_res_in(x, w, y, residual, eps, bias, scale):
    """Adds x to the residual in place, then writes the norm of the sum to y."""
    residual.copy_(residual.float() + _finite(x))
    y.copy_(_normalize(residual.float(), w, eps, bias, scale))


def _norm_heads(heads, weight, eps, bias):
    """The per-head norm inside `rope`: normalized and weighted in half precision."""
    return (heads.float() * _inverse_rms(heads, eps)).half() * (weight.half() + bias)


def rope(
    q,
    out_q,
    k,
    out_k,
    inv_freq,
    position,
    positions,
    position_ids,
    style,
    attn_factor,
    q_norm,
    k_norm,
    eps,
    bias,
    scaling_beta,
    scaling_original,
    rotate_dims,
    rotate_offset,
):
    """Rotates the heads of q and k, [bsz, q_len, heads, head_dim] half, after an optional norm.

    Row positions are `position_ids` [bsz, q_len], else `positions` [bsz] plus the column, else
    `position` plus the column.
    """
    if inv_freq.dim() != 1 or scaling_beta > 0.0 or rotate_dims != 1 or rotate_offset != 0:
        raise NotImplementedError("rope: only plain one-dimensional rotary embeddings")
    bsz, q_len = q.shape[:2]
    if position_ids is not None:
        where = position_ids
    else:
        start = positions.view(bsz, 1) if positions is not None else position
        where = start + torch.arange(q_len).view(1, q_len)
    angles = where.float().reshape(-1, q_len, 1, 1) * inv_freq.float()
    cos, sin = angles.cos() * attn_factor, angles.sin() * attn_factor
    n_pairs = inv_freq.shape[-1]
    neox = int(style) == 2
    for heads, out, norm in ((q, out_q, q_norm), (k, out_k, k_norm)):
        if heads is None:
            continue
        if norm is not None:
            heads = _norm_heads(heads, norm, eps, bias)
        x = heads[..., : 2 * n_pairs].float()
        first, second = (
            (x[..., :n_pairs], x[..., n_pairs:]) if neox else (x[..., ::2], x[..., 1::2])
        )
        rotated = first * cos - second * sin, second * cos + first * sin
        if neox:
            out[..., : 2 * n_pairs] = torch.cat(rotated, dim=-1)
        else:
            out[..., : 2 * n_pairs] = torch.stack(rotated, dim=-1).flatten(-2)
        if heads.data_ptr() != out.data_ptr():
            out[..., 2 * n_pairs :] = heads[..., 2 * n_pairs :]


def _gated(activation, gate, up, out, limit):
    """out = activation(gate) * up, clamped to what a half can hold."""
    act, up = activation(gate.float()), up.float()
    if limit != 0.0:
        act, up = act.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((act * up).clamp(-HALF_MAX, HALF_MAX))


def silu_mul(gate, up, out, limit):
    _gated(torch.nn.functional.silu, gate, up, out, limit)


def gelu_mul(gate, up, out, limit):
    _gated(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), gate, up, out, limit)


def relu2_mul(gate, up, out, limit):
    _gated(lambda x: x.relu().square(), gate, up, out, limit)


def hgemm(a, b, c):
    """c = a [rows, k] @ b [k, n], halves; c is half or float32."""
    c.copy_(a.double() @ b.double())


def softcap(x, y, scale):
    y.copy_(torch.tanh(x.float() / scale) * scale)


class BC_LinearFP16:
    """A half linear: weight [in, out], bias [out] or None."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def run(self, x, y):
        hgemm(x, self.weight, y)
        if self.bias is not None:
            y += self.bias


def linear_fp16_forward(self, x, params, out_dtype=None):
    """Stands for LinearFP16.forward: [..., in] -> [..., out], half unless told otherwise."""
    if getattr(self, "weight64", None) is None:
        self.weight64 = self.weight.double()  # converting it for every token would take longest
    y = x.reshape(-1, x.shape[-1]).double() @ self.weight64
    y = y.to(out_dtype or self.out_dtype or torch.half)
    if self.bias is not None:
        y += self.bias
    return y.view(*x.shape[:-1], self.out_features)


# --- EXL3 storage --------------------------------------------------------------------------------


@functools.lru_cache
def _codebook(mcg, mul1):
    """Returns the 65,536 half values that trellis states stand for (quant/codebook.cuh)."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if mul1:
        product = state * np.uint32(0x83DCD12D)
        total = product.view(np.uint8).reshape(-1, 4).sum(axis=1)
        inverse, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float32)
        return torch.from_numpy(((1024 + total) * inverse + offset).astype(np.float16))
    product = (
        state * np.uint32(0xCBAC1FED) if mcg else state * np.uint32(89226354) + np.uint32(64248484)
    )
    halves = ((product & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16)
    return torch.from_numpy(halves[0::2] + halves[1::2])


@functools.lru_cache
def _window_bits(bits):
    """Returns, for each of the 256 weights of a tile, the ring positions of its 16 state bits.

    Weight i adds D(i) bits to a ring of 256 * `bits` bits and is decoded from the last 16 bits up
    to there. D is the bitrate; at half-integer rates odd weights have one bit more than even ones.
    """
    whole = int(bits)
    added = np.full(256, whole)
    if whole != bits:
        added[1::2] += 1
    ends = np.cumsum(added)
    return (ends[:, None] - 16 + np.arange(16)) % ends[-1]


@functools.lru_cache
def _tile_order():
    """Returns the row-major index in a 16 x 16 tile of each weight, in trellis order."""
    i = np.arange(256)
    lane, slot = i // 8, i % 8
    row = lane % 4 * 2 + (slot & 1) + (slot & 2) * 4
    column = lane // 4 + (slot & 4) * 2
    return row * 16 + column


def _decode_trellis(trellis, bits, mcg, mul1):
    """Returns the half weight [in, out] of a trellis, int16 [in / 16, out / 16, 16 * bits].

    Inner weights: still rotated and without the scales. The bit stream is stored in 32-bit words,
    most significant bit first.
    """
    n_rows, n_columns, n_words = trellis.shape
    words = trellis.contiguous().numpy().view(np.uint32).reshape(n_rows * n_columns, n_words // 2)
    stream = np.unpackbits(words.astype(">u4").view(np.uint8), axis=1)
    states = stream[:, _window_bits(bits)].astype(np.int64) @ (1 << np.arange(15, -1, -1))
    tiles = torch.empty((states.shape[0], 256), dtype=torch.half)
    tiles[:, torch.from_numpy(_tile_order())] = _codebook(bool(mcg), bool(mul1))[
        torch.from_numpy(states)
    ]
    grid = tiles.view(n_rows, n_columns, 16, 16).permute(0, 2, 1, 3)
    return grid.reshape(n_rows * 16, n_columns * 16)


def reconstruct(out, trellis, bits, mcg, mul1):
    out.copy_(_decode_trellis(trellis, bits, mcg, mul1))


def reconstruct_slice(out, trellis, bits, mcg, mul1, first_column):
    columns = trellis[:, first_column // 16 : (first_column + out.shape[1]) // 16]
    out.copy_(_decode_trellis(columns, bits, mcg, mul1))


@functools.lru_cache
def _hadamard():
    """Returns the orthonormal 128 x 128 Hadamard matrix, float32."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < HADAMARD:
        top = torch.cat((matrix, matrix), dim=1)
        matrix = torch.cat((top, torch.cat((matrix, -matrix), dim=1)), dim=0)
    return matrix / math.sqrt(HADAMARD)


def had_r_128(x, y, pre_scale, post_scale, scale):
    """y = x times the Hadamard matrix in blocks of 128 channels, scaled before or after."""
    x = x.float() if pre_scale is None else x.float() * pre_scale.float()
    x = (x.reshape(-1, HADAMARD) @ _hadamard()).view(y.shape) * scale
    y.copy_(x if post_scale is None else x * post_scale.float())


class BC_LinearEXL3:
    """An EXL3 linear, decoded to a dense weight on first use and kept.

    The kernels rotate the activations and multiply with rotated weights; here the weights are
    rotated back once, which is the same product.
    """

    def __init__(self, trellis, suh, svh, bits, bias, mcg, mul1, scratch):
        self.trellis, self.suh, self.svh, self.bits = trellis, suh, svh, bits
        self.bias, self.mcg, self.mul1 = bias, mcg, mul1

    @functools.cached_property
    def weight(self):
        """The dense weight, float64 [in, out]."""
        inner = _decode_trellis(self.trellis, self.bits, self.mcg, self.mul1).float()
        n_in, n_out = inner.shape
        left = (_hadamard() @ inner.view(-1, HADAMARD, n_out)).view(n_in, n_out)
        both = ((left * self.suh.float()[:, None]).view(-1, HADAMARD) @ _hadamard()).view(
            n_in, n_out
        )
        return (both * self.svh.float()).double()

    def run(self, x, y):
        y.copy_((x.reshape(-1, x.shape[-1]).double() @ self.weight).view(y.shape))
        if self.bias is not None:
            y += self.bias

    def run_alloc(self, x, out_features, output_fp32):
        dtype = torch.float if output_fp32 else torch.half
        y = torch.empty((*x.shape[:-1], out_features), dtype=dtype)
        self.run(x, y)
        return y


class BC_GatedMLP:
    """gate, up, activation and down of a quantized MLP in one call, for a few rows."""

    def __init__(self, gu_scratch, act_scratch, *rest):
        (_, _, _, _, _, _, _, _, silu, gelu, relu2, self.gate, self.up, self.down, self.limit) = (
            rest
        )
        self.interm_dtype = act_scratch.dtype
        self.activation = silu_mul if silu else gelu_mul if gelu else relu2_mul
        assert silu or gelu or relu2

    def run_bszN(self, x, out):
        fp32 = self.interm_dtype == torch.float
        gate = self.gate.run_alloc(x, self.gate.weight.shape[1], fp32)
        up = self.up.run_alloc(x, self.up.weight.shape[1], fp32)
        act = torch.empty_like(up, dtype=torch.half)
        self.activation(gate, up, act, self.limit)
        self.down.run(act, out)


def routing_std(x, gate, logits, experts, weights, expert_scale, gate_t, bias, gate_i8, gate_sb):
    """Writes the best experts of each row and their softmax weights, over those experts alone."""
    hgemm(x, gate, logits)
    scores = logits.float() if bias is None else logits.float() + bias.float()
    best, index = scores.topk(experts.shape[-1], dim=-1)
    probs = best.softmax(dim=-1)
    if expert_scale is not None:
        probs = probs * expert_scale.float()[index]
    experts.copy_(index)
    weights.copy_(probs)


# --- cache and attention -------------------------------------------------------------------------


def _cache_slots(block_row, first, count):
    """Returns (page, offset) index tensors of `count` positions from `first` on, of one row."""
    position = torch.arange(first, first + count)
    return block_row[position // PAGE].long(), position % PAGE


def paged_kv_cache_update(k, v, k_cache, v_cache, block_table, cache_seqlens):
    """Writes new rows [bsz, n, heads, dim] behind the `cache_seqlens` rows already there."""
    for row, n_past in enumerate(cache_seqlens.tolist()):
        slots = _cache_slots(block_table[row], n_past, k.shape[1])
        k_cache[slots] = k[row]
        v_cache[slots] = v[row]


def cache_rotate(cache, order, temp):
    """Moves pages: `order` is pairs (to, from), where -1 is the page `temp`."""
    for target, source in order.view(-1, 2).tolist():
        page = temp if source < 0 else cache[source]
        (temp if target < 0 else cache[target]).copy_(page)


QUERY_BLOCK = 256  # bounds the score matrix of a long prefill


def _attend(q, k, v, n_past, scale, causal, cap):
    """Attention of q [n, heads, dim] over k, v [n_past + n, kv_heads, dim]; returns q's shape."""
    n, n_heads, dim = q.shape
    n_kv_heads = k.shape[1]
    keys = k.double().permute(1, 2, 0)
    values = v.double().transpose(0, 1)
    out = torch.empty_like(q)
    for a in range(0, n, QUERY_BLOCK):
        b = min(a + QUERY_BLOCK, n)
        visible = n_past + b if causal else keys.shape[-1]
        block = q[a:b].double().view(b - a, n_kv_heads, n_heads // n_kv_heads, dim)
        block = block.permute(1, 2, 0, 3).reshape(n_kv_heads, -1, dim)
        scores = block @ keys[..., :visible] * scale
        if cap:
            scores = torch.tanh(scores / cap) * cap
        if causal and b - a > 1:
            late = torch.arange(visible) > torch.arange(n_past + a, n_past + b)[:, None]
            scores = scores.view(n_kv_heads, -1, b - a, visible).masked_fill(late, -math.inf)
            scores = scores.view(n_kv_heads, -1, visible)
        result = scores.softmax(dim=-1) @ values[:, :visible]
        result = result.view(n_kv_heads, -1, b - a, dim).permute(2, 0, 1, 3)
        out[a:b] = result.reshape(b - a, n_heads, dim)
    return out


def attention(args):
    """An attention function of exllamav3 (AttnArgs -> o [bsz, q_len, heads, dim]), or None.

    With a cache, new keys and values are written to their pages first, then all are read back.
    """
    special = args.non_causal_spans or args.is_varlen() or args.is_swa() or args.sinks is not None
    if special or args.q_cache is not None:
        return None
    rows = []
    if args.has_kv_cache():
        paged_kv_cache_update(
            args.k, args.v, args.k_cache, args.v_cache, args.block_table, args.cache_seqlens
        )
    for row in range(args.bsz):
        k, v, n_past = args.k[row], args.v[row], 0
        if args.has_kv_cache():
            n_past = int(args.cache_seqlens[row])
            n = n_past + args.q_len
            pages = args.block_table[row, : -(-n // PAGE)].long()
            k = args.k_cache[pages].flatten(0, 1)[:n]
            v = args.v_cache[pages].flatten(0, 1)[:n]
        rows.append(_attend(args.q[row], k, v, n_past, args.sm_scale, args.causal, args.softcap))
    return torch.stack(rows)


# --- generator -----------------------------------------------------------------------------------


def generator_stage_decode(
    arena, width, block_rows, kv_position, rope_offset, batch_ids, seq_ids, page_seq, page_offset
):
    """Fills the int32 arena: block rows padded to `width`, lengths, and optionally positions.

    With `seq_ids`, also puts each row's next token into `batch_ids` [rows, 1] and into its page.
    """
    flat = arena.numpy()
    n = len(block_rows)
    for row, blocks in enumerate(block_rows):
        used = min(blocks.numel(), width)
        flat[row * width : row * width + used] = blocks.view(-1)[:used].numpy()
        flat[row * width + used : (row + 1) * width] = 0
    flat[n * width : n * width + n] = kv_position
    if rope_offset:
        flat[n * width + n : n * width + 2 * n] = np.add(kv_position, rope_offset)
    for row, ids in enumerate(seq_ids):
        token = ids[0, kv_position[row]]
        batch_ids[row, 0] = token
        page_seq[row][0, page_offset[row]] = token


def count_match_tensor(a, b, limit):
    """Returns how many leading tokens of a and b are equal, at most `limit`."""
    n = min(limit, a.numel(), b.shape[1])
    different = (a.view(-1)[:n] != b.reshape(-1)[:n]).numpy()
    return int(different.argmax()) if different.any() else n


def partial_strings_match(text, offsets, strings):
    """Returns where the first of `strings` in `text` begins, -2 when one may be beginning, or -1.

    All are UTF-32 buffers; `offsets` are int32 byte offsets into `strings`. -2 means that the end
    of the text is the beginning of a string, and that it begins before any full match.
    """
    text = bytes(text).decode("utf-32-le")
    bounds = np.frombuffer(bytes(offsets), dtype=np.int32).tolist()
    packed = bytes(strings)
    none = len(text) + 1
    full = partial = none
    for a, b in itertools.pairwise(bounds):
        string = packed[a:b].decode("utf-32-le")
        if not string:
            continue
        at = text.find(string)
        full = min(full, at if at >= 0 else none)
        for start in range(max(0, len(text) - len(string) + 1), len(text)):
            if string.startswith(text[start:]):
                partial = min(partial, start)
                break
    if partial < full:
        return -2
    return full if full < none else -1


class BC_SAM:
    """A suffix automaton: finds the longest suffix of a sequence that occurred earlier in it."""

    def __init__(self):
        self.reset()

    def reset(self, reserve_tokens=0):
        self.link, self.max_len, self.first_end, self.edges = [-1], [0], [0x7FFFFFFF], [{}]
        self.last = self.state = self.matched = self.position = 0

    def length(self):
        return self.position

    def accept_tensor(self, tokens):
        """Accepts what is new in the whole sequence `tokens` [1, n].

        Returns (begin, end) of the earlier occurrence of the longest suffix, or (-1, -1). A
        sequence shorter than before starts over.
        """
        ids = tokens.view(-1)
        if ids.numel() < self.position:
            self.reset()
        new = ids[self.position :].tolist()
        found = (-1, -1)
        for token in new:
            found = self.accept(token)
        return found

    def accept(self, token):
        self._advance(token)
        found = (-1, -1)
        if self.matched:
            end = self.first_end[self.state] + 1
            found = (end - self.matched, end)
        self._extend(token)
        return found

    def _advance(self, token):
        """Follows the token from the longest match so far, or from its longest suffix that can."""
        while self.state and token not in self.edges[self.state]:
            self.state = self.link[self.state]
            self.matched = min(self.matched, self.max_len[self.state])
        if token in self.edges[self.state]:
            self.state = self.edges[self.state][token]
            self.matched += 1
        else:
            self.state = self.matched = 0

    def _new_state(self, max_len, link, first_end, edges):
        self.link.append(link)
        self.max_len.append(max_len)
        self.first_end.append(first_end)
        self.edges.append(edges)
        return len(self.link) - 1

    def _extend(self, token):
        """Adds one token to the automaton (Blumer et al.)."""
        current = self._new_state(self.max_len[self.last] + 1, 0, self.position, {})
        p = self.last
        while p != -1 and token not in self.edges[p]:
            self.edges[p][token] = current
            p = self.link[p]
        if p != -1:
            q = self.edges[p][token]
            if self.max_len[p] + 1 == self.max_len[q]:
                self.link[current] = q
            else:
                length = self.max_len[p] + 1
                clone = self._new_state(
                    length, self.link[q], self.first_end[q], dict(self.edges[q])
                )
                while p != -1 and self.edges[p].get(token) == q:
                    self.edges[p][token] = clone
                    p = self.link[p]
                self.link[q] = self.link[current] = clone
        self.last = current
        self.position += 1


# --- sampling ------------------------------------------------------------------------------------


def _gumbel(shape, seed):
    """Returns Gumbel noise that depends on the seed and the position alone."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(shape, generator=generator).clamp(1e-20, 0.99999994)
    return -torch.log((-torch.log(uniform)).clamp(min=1e-20))


def gumbel_noise_f16(logits, out, seed):
    out.copy_(logits.float() + _gumbel(logits.shape, seed))


def gumbel_noise_f32(logits, out, seed):
    out.copy_(logits + _gumbel(logits.shape, seed))


def gumbel_noise_log(probs, out, seed):
    out.copy_(probs.log() + _gumbel(probs.shape, seed))


def adaptivep_gumbel_noise_f32(probs, out, seed, target, inv_width, peak, sharpness):
    distance = (probs - float(target)).abs() * inv_width
    shaped = peak - sharpness * distance * distance / (distance + 1.0)
    noisy = shaped + _gumbel(probs.shape, seed)
    out.copy_(noisy.masked_fill(probs < 1e-8, -math.inf))


def _recent(past_ids, vocab_size, sustain_range, decay_range):
    """Returns (ids, factors) of the past tokens in range; factors fall from 1 to 0 with age."""
    ids = past_ids.view(-1)[-min(past_ids.numel(), sustain_range + decay_range) :]
    distance = torch.arange(ids.numel(), 0, -1).float()
    factor = torch.ones_like(distance)
    if decay_range > 0:
        factor = (1.0 - (distance - sustain_range) / decay_range).clamp(0.0, 1.0)
    known = ids < vocab_size  # image placeholders are not in the vocabulary
    return ids[known], factor[known]


def apply_rep_pens(logits, out, past_ids, penalty, sustain_range, decay_range):
    """Divides positive and multiplies negative logits of past tokens by the penalty."""
    x = logits.float()
    ids, factor = _recent(past_ids, x.shape[-1], sustain_range, decay_range)
    strength = torch.zeros(x.shape[-1]).scatter_reduce_(0, ids, factor, "amax")
    penalized = torch.where(x > 0.0, x / penalty, x * penalty)
    # Where the strength is 0 or 1 one of the terms is infinity times zero for a banned token
    mixed = torch.where(strength == 0.0, x, x * (1.0 - strength) + penalized * strength)
    out.copy_(torch.where(strength == 1.0, penalized, mixed))


def apply_pres_freq_pens(logits, out, past_ids, presence, frequency, sustain_range, decay_range):
    """Lowers logits of past tokens, once for presence and once per occurrence for frequency."""
    x = logits.float()
    ids, factor = _recent(past_ids, x.shape[-1], sustain_range, decay_range)
    zeros = torch.zeros(x.shape[-1])
    present = zeros.scatter_reduce(0, ids, factor, "amax")
    counted = zeros.scatter_add(0, ids, factor)
    out.copy_(x - counted * frequency - present * presence)


def _match_lengths(ids):
    """Returns, for each k, how many leading elements ids[k:] shares with ids (the Z function)."""
    n = len(ids)
    lengths = [n] + [0] * (n - 1)
    left = right = 0
    for i in range(1, n):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < n and ids[length] == ids[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        lengths[i] = length
    return lengths


def dry_penalty(
    logits,
    out,
    past_ids,
    breakers,
    workspace,
    counters,
    multiplier,
    base,
    allowed_length,
    window,
    max_exponent,
    match_cap,
):
    """Lowers each token that would go on with a repetition longer than `allowed_length`."""
    out.copy_(logits)
    ids = past_ids.view(-1).tolist()[::-1]  # most recent first
    ids = ids[:window] if window > 0 else ids
    blocked = set() if breakers is None else set(breakers.nonzero().view(-1).tolist())
    limit = next((i for i, token in enumerate(ids) if token in blocked), len(ids))
    if len(ids) <= allowed_length or limit < allowed_length:
        return
    limit = min(limit, allowed_length + max_exponent if max_exponent > 0 else match_cap)
    longest = {}
    for k, length in enumerate(_match_lengths(ids)[1:], start=1):
        length = min(length, limit)
        if length >= allowed_length and 0 <= ids[k - 1] < logits.shape[-1]:
            longest[ids[k - 1]] = max(length, longest.get(ids[k - 1], 0))
    for token, length in longest.items():
        if token not in blocked:
            exponent = length - allowed_length
            exponent = min(exponent, max_exponent) if max_exponent > 0 else exponent
            out[0, token] -= multiplier * base**exponent


def apply_logit_bitmask(logits, out, bitmask):
    """out = logits where the token's bit is set, else -inf; 32 tokens to an int32 word."""
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=-1, bitorder="little")
    keep = torch.zeros((bits.shape[0], logits.shape[-1]), dtype=torch.bool)
    width = min(bits.shape[-1], logits.shape[-1])
    keep[:, :width] = torch.from_numpy(bits[:, :width]).bool()
    out.copy_(logits.masked_fill(~keep, -math.inf))


# --- installation --------------------------------------------------------------------------------

KERNELS = (
    BC_GatedMLP,
    BC_LinearEXL3,
    BC_LinearFP16,
    BC_SAM,
    adaptivep_gumbel_noise_f32,
    apply_logit_bitmask,
    apply_pres_freq_pens,
    apply_rep_pens,
    cache_rotate,
    count_match_tensor,
    dry_penalty,
    gelu_mul,
    generator_stage_decode,
    gumbel_noise_f16,
    gumbel_noise_f32,
    gumbel_noise_log,
    had_r_128,
    hgemm,
    paged_kv_cache_update,
    partial_strings_match,
    reconstruct,
    reconstruct_slice,
    relu2_mul,
    rms_norm,
    rms_norm_res_in,
    rope,
    routing_std,
    silu_mul,
    softcap,
)


class _Extension(types.ModuleType):
    """The compiled extension: the stand-ins, and for any other name a function that refuses.

    exllamav3 looks kernels up when it defines and builds its modules, long before it needs them,
    so a missing one may only fail when it is called.
    """

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args, **kwargs):
            raise NotImplementedError(f"the CPU stand-in of exllamav3 has no kernel {name!r}")

        return refuse


def _load_on_cpu(self, progressbar, reserve, use, devices, chunk, n_out, factor, callback, *rest):
    """Stands for Model._load_autosplit, a generator of (modules done, modules in all)."""
    from exllamav3.util.progress import ProgressBar

    modules = self.modules
    with ProgressBar("Loading (CPU)" if progressbar else None, len(modules)) as progress:
        for done in range(len(modules) + 1):
            if callback:
                callback(done, len(modules))
            yield done, len(modules)
            if done < len(modules):
                modules[done].load(torch.device("cpu"))
                progress.update(done + 1)
    self.config.stc.close()
    self.active_devices = []


def _without_pinning(function):
    """Drops `pin_memory` from a tensor constructor: without a driver there is nothing to pin to."""

    @functools.wraps(function)
    def unpinned(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return unpinned


def _patch_torch():
    for name in ("empty", "empty_like", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.cuda.synchronize = lambda device=None: None


def _patch_exllamav3():
    from exllamav3.loader.safetensors import SafetensorsCollection
    from exllamav3.model.config import InferParams
    from exllamav3.model.model import Model
    from exllamav3.modules.attention_fn import dispatch
    from exllamav3.modules.block_sparse_mlp import BlockSparseMLP
    from exllamav3.modules.quant.fp16 import LinearFP16

    def prepend(cls, before):
        original = cls.__init__

        @functools.wraps(original)
        def init(self, *args, **kwargs):
            return before(functools.partial(original, self), self, *args, **kwargs)

        cls.__init__ = init

    def read_with_python(original, self, directory, load_method=None, *args, **kwargs):
        original(directory, load_method or "python", *args, **kwargs)

    def without_device_pointers(original, self):
        original()
        self.no_reconstruct = True

    load_experts = BlockSparseMLP.load

    def load_experts_on_cpu(self, device, **kwargs):
        load_experts(self, device, **kwargs)
        self.load_local(**kwargs)
        self.load_routing(**kwargs)

    prepend(SafetensorsCollection, read_with_python)
    prepend(InferParams, without_device_pointers)
    BlockSparseMLP.load = load_experts_on_cpu
    Model._load_autosplit = _load_on_cpu
    Model.warmup = lambda self, **kwargs: []
    LinearFP16.forward = linear_fp16_forward
    dispatch.attn_fns.insert(0, attention)


def install():
    """Puts the stand-ins in place, once per process, and imports exllamav3.

    Call it before anything else imports exllamav3; asserts that nothing has.
    """
    if isinstance(sys.modules.get("exllamav3.ext"), types.ModuleType):
        assert isinstance(sys.modules["exllamav3.ext"].exllamav3_ext, _Extension)
        return
    assert "exllamav3" not in sys.modules, "exllamav3 was imported before cpu_exllamav3.install()"
    os.environ.update(EXL3_FUSED_SAMPLER="0", EXL3_BC_ATTN="0", CUDA_VISIBLE_DEVICES="")
    extension = _Extension("exllamav3_ext")
    extension.HAS_DET_GEMM = False
    for kernel in KERNELS:
        setattr(extension, kernel.__name__, kernel)
    holder = types.ModuleType("exllamav3.ext")
    holder.exllamav3_ext = extension
    sys.modules["exllamav3.ext"] = holder
    _patch_torch()
    _patch_exllamav3()
