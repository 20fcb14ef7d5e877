"""The independent judge: naive float64 code written from the papers and shared/methods.md, in double loops.

Nothing here is imported from hf_posenc or from transformers' rope utilities. Angles are in radians, positions in
tokens, `frequencies` a list of d/2 numbers (radians per token) and `factor` the absolute extension factor s.
"""

import math
from collections.abc import Callable

import torch

Frequencies = list[float]
# (query position, key position) -> (angle per pair for the query, angle per pair for the key)
Angle = Callable[[float, float], tuple[list[float], list[float]]]


# --- frequencies -----------------------------------------------------------------------------------------------------


def rope(d: int, base: float = 10000.0) -> Frequencies:
    """base^(-2k/d) for the d/2 pairs k."""
    return [base ** (-2 * k / d) for k in range(d // 2)]


def pi(d: int, base: float, factor: float) -> Frequencies:
    """Position Interpolation: all frequencies divided by the factor."""
    return [frequency / factor for frequency in rope(d, base)]


def ntk_base(d: int, base: float, factor: float) -> float:
    return base * factor ** (d / (d - 2))


def ntk(d: int, base: float, factor: float) -> Frequencies:
    return rope(d, ntk_base(d, base, factor))


def yarn_dimension(rotations: float, d: int, base: float, original: float) -> float:
    """The (fractional) pair that makes `rotations` turns within the original length."""
    return d * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))


def yarn_range(
    d: int, base: float, original: float, beta_fast: float = 32, beta_slow: float = 1, truncate: bool = True
) -> tuple[float, float]:
    """First and last pair of the ramp, clamped to [0, d - 1]."""
    low, high = yarn_dimension(beta_fast, d, base, original), yarn_dimension(beta_slow, d, base, original)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, d - 1)


def ntk_by_parts(
    d: int,
    base: float,
    factor: float,
    original: float,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Frequencies:
    """YaRN's ramp, linear in frequency: fast pairs keep their frequency, slow ones are divided by the factor."""
    low, high = yarn_range(d, base, original, beta_fast, beta_slow, truncate)
    if low == high:
        high += 0.001
    mixed = []
    for k, frequency in enumerate(rope(d, base)):
        kept = 1 - min(max((k - low) / (high - low), 0.0), 1.0)
        mixed.append(frequency * kept + frequency / factor * (1 - kept))
    return mixed


yarn = ntk_by_parts


def mscale_of(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(
    factor: float, given: float | None = None, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What cos and sin are multiplied by under YaRN; mscale and mscale_all_dim count only when both are set."""
    if given is not None:
        return given
    if mscale and mscale_all_dim:
        return mscale_of(factor, mscale) / mscale_of(factor, mscale_all_dim)
    return mscale_of(factor)


def dynamic_ntk_base(n: float, d: int, base: float, original: float, factor: float = 1.0) -> float:
    if n <= original:
        return base
    return base * (factor * n / original - (factor - 1)) ** (d / (d - 2))


def dynamic_ntk(n: float, d: int, base: float, original: float, factor: float = 1.0) -> Frequencies:
    """Frequencies for the current length n."""
    return rope(d, dynamic_ntk_base(n, d, base, original, factor))


def dynamic_yarn(n: float, d: int, base: float, original: float, **ramp) -> tuple[Frequencies, float]:
    """(frequencies, attention factor) of YaRN with s = max(1, n / original)."""
    factor = max(1.0, n / original)
    return yarn(d, base, factor, original, **ramp), attention_factor(factor)


def llama3(
    d: int, base: float, factor: float, original: float, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0
) -> Frequencies:
    """Llama 3.1: by wavelength, kept below original / high, divided above original / low, blended between."""
    scaled = []
    for frequency in rope(d, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high_freq_factor:
            scaled.append(frequency)
        elif wavelength > original / low_freq_factor:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


def longrope(
    n: float,
    d: int,
    base: float,
    original: float,
    factor: float,
    short_factor: list[float],
    long_factor: list[float],
    given: float | None = None,
) -> tuple[Frequencies, float]:
    """(frequencies, attention factor) at length n: long factors iff n > original, the same attention factor."""
    divisors = long_factor if n > original else short_factor
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = [frequency / divisor for frequency, divisor in zip(rope(d, base), divisors, strict=True)]
    return frequencies, scale if given is None else given


def rounded_length(n: int, original: int, granularity: int = 1) -> int:
    """n rounded up to a multiple of the granularity beyond the original length, n itself up to it."""
    return n if n <= original else math.ceil(n / granularity) * granularity


# --- distances of position maps --------------------------------------------------------------------------------------


def plain_distance(i: int, j: int) -> int:
    return i - j


def self_extend_distance(i: int, j: int, window: int, group: int) -> int:
    if i - j < window:
        return i - j
    return i // group - j // group + window - window // group


def rerope_distance(i: int, j: int, window: int) -> int:
    return min(i - j, window)


def leaky_rerope_distance(i: int, j: int, window: int, scale: float) -> float:
    return i - j if i - j < window else window + scale * (i - j - window)


def dca_distance(i: int, j: int, chunk: int, local: int) -> int:
    """Dual Chunk Attention: distance inside the chunk, to the previous chunk, and to any farther one."""
    last = chunk + local - 1
    if i // chunk == j // chunk:
        return i - j
    if i // chunk == j // chunk + 1:
        return min(chunk + i % chunk, last) - j % chunk
    return last - j % chunk


def string_distance(i: int, j: int, shift: int, window: int) -> int:
    return i - j if i - j < shift else i - j - shift + window


def both_ways(distance: Callable[..., float]) -> Callable[..., float]:
    """The same for later keys, on the other side."""
    return lambda i, j, *more, **named: distance(i, j, *more, **named) if j <= i else -distance(j, i, *more, **named)


def distance_row(distance: Callable, i: int, **parameters) -> list:
    """Distances from query i to the keys 0...i.

    >>> distance_row(self_extend_distance, 9, window=4, group=2)
    [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    """
    return [distance(i, j, **parameters) for j in range(i + 1)]


# --- biases ----------------------------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/n) for a power of two; else those of the next lower one, then every second of the next higher one."""
    lower = 1
    while 2 * lower <= heads:
        lower *= 2
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    higher = [2 ** (-8 * h / (2 * lower)) for h in range(1, 2 * lower + 1)]
    return slopes + higher[::2][: heads - lower]


def t5_bucket(
    distance: int, buckets: int, longest: int, causal: bool, interpolate: float = 1.0, nudge: float = 0.0
) -> int:
    """Bucket of distance i - j. `nudge` moves the logarithm, to tell what rounding may decide."""
    first = 0
    if causal:
        distance = max(distance, 0)
    else:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    distance = math.floor(distance / interpolate)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    grown = math.log(distance / exact) / math.log(longest / exact) * (buckets - exact) + nudge
    return first + min(exact + math.floor(grown), buckets - 1)


def xpos_fade(i: int, j: int, d: int, gamma: float = 0.4, scale_base: float = 512) -> list[float]:
    """zeta_k^((i - j) / B) for the d/2 pairs k, zeta_k = (2k/d + gamma) / (1 + gamma)."""
    return [((2 * k / d + gamma) / (1 + gamma)) ** ((i - j) / scale_base) for k in range(d // 2)]


def temperature(i: int) -> float:
    """Llama 4's factor on queries of layers without a position."""
    return 1 + 0.1 * math.log(1 + (i + 1) // 8192)


# --- rotation and attention ------------------------------------------------------------------------------------------


def rotate(vector: list[float], angles: list[float], pairing: str = "half", start: int = 0) -> list[float]:
    """One head vector (dim,) with its d = 2 len(angles) dimensions from `start` on rotated, the rest untouched.

    `half` pairs dimension k with k + d/2, `interleaved` pairs 2k with 2k + 1.
    """
    half = len(angles)
    rotated = list(vector)
    for k, angle in enumerate(angles):
        first, second = (k, k + half) if pairing == "half" else (2 * k, 2 * k + 1)
        x, y = vector[start + first], vector[start + second]
        rotated[start + first] = x * math.cos(angle) - y * math.sin(angle)
        rotated[start + second] = y * math.cos(angle) + x * math.sin(angle)
    return rotated


def by_frequencies(frequencies: Frequencies) -> Angle:
    """Angles of an ordinary rotary encoding."""
    return lambda i, j: ([i * frequency for frequency in frequencies], [j * frequency for frequency in frequencies])


def by_distance(frequencies: Frequencies, distance: Callable[[int, int], float]) -> Angle:
    """Angles of a position map: the query is turned by the mapped distance, the key not at all."""
    return lambda i, j: ([distance(i, j) * frequency for frequency in frequencies], [0.0] * len(frequencies))


def by_length(frequencies_of_length: Callable[[int], Frequencies]) -> Angle:
    """Query i uses the frequencies of length i + 1 for itself and for every key."""
    return lambda i, j: by_frequencies(frequencies_of_length(i + 1))(i, j)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def attention_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angle: Angle,
    *,
    scale: float | None = None,
    query_positions: list[int] | None = None,
    key_positions: list[int] | None = None,
    pairing: str = "half",
    start: int = 0,
    window: int | None = None,
    bias: Callable[[int, int, int], float] | None = None,
    sinks: list[float] | None = None,
    fade: Callable[[int, int], list[float]] | None = None,
    value_angle: Callable[[int, int], list[float]] | None = None,
    query_scale: Callable[[int], float] | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Causal attention of one row, pair by pair.

    query (heads, n, dim), key (kv heads, m, dim) and value (kv heads, m, value dim) are raw: no rotation yet. Key j is
    seen by query i if its position is not later and, with a window, less than `window` tokens back. `scale` defaults
    to dim^-1/2; `bias(head, i, j)` is added to the score; a head's sink takes weight as one more score would.
    `fade(i, j)` multiplies what each rotated pair adds to a score, `value_angle(i, j)` turns the value of a key for a
    query, `query_scale(i)` multiplies a query, and a query sees keys of its own `chunk` of positions only. Returns
    (heads, n, value dim) in float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    heads, n, dim = query.shape
    groups = heads // key.shape[0]
    scale = dim**-0.5 if scale is None else scale
    query_positions = list(range(n)) if query_positions is None else query_positions
    key_positions = list(range(key.shape[1])) if key_positions is None else key_positions
    output = torch.zeros(heads, n, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        keys, values = key[head // groups].tolist(), value[head // groups]
        queries = query[head].tolist()
        for row, i in enumerate(query_positions):
            seen = [c for c, j in enumerate(key_positions) if j <= i and (window is None or i - j < window)]
            seen = [c for c in seen if chunk is None or key_positions[c] // chunk == i // chunk]
            scores = []
            for column in seen:
                j = key_positions[column]
                query_angles, key_angles = angle(i, j)
                left = rotate(queries[row], query_angles, pairing, start)
                right = rotate(keys[column], key_angles, pairing, start)
                if fade:
                    half = len(query_angles)
                    for pair, kept in enumerate(fade(i, j)):
                        places = (pair, pair + half) if pairing == "half" else (2 * pair, 2 * pair + 1)
                        for place in places:
                            right[start + place] *= kept
                score = scale * sum(a * b for a, b in zip(left, right, strict=True))
                score *= query_scale(i) if query_scale else 1.0
                scores.append(score + (bias(head, i, j) if bias else 0.0))
            if seen:
                weights = softmax([*scores, sinks[head]] if sinks else scores)
                for weight, column in zip(weights, seen, strict=False):
                    vector = values[column]
                    if value_angle:
                        turned = rotate(vector.tolist(), value_angle(i, key_positions[column]), pairing, start)
                        vector = torch.tensor(turned, dtype=torch.float64)
                    output[head, row] += weight * vector
    return output


# --- a whole Llama ---------------------------------------------------------------------------------------------------


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotate_rows(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`rotate` with half pairing for states (heads, n, dim) and angles (n, d/2); dimensions from d on are kept."""
    half = angles.shape[-1]
    x, y, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin(), rest], -1)


def llama_logits(
    model,
    ids: torch.Tensor,
    angle: Angle,
    *,
    scale: Callable[[int], float] = lambda i: 1.0,
    positions: list[int] | None = None,
    window: int | None = None,
    bias: Callable[[int, int, int], float] | None = None,
    angle_of_layer: Callable[[int], Angle] | None = None,
    bias_of_layer: Callable[[int], Callable[[int, int, int], float]] | None = None,
) -> torch.Tensor:
    """Logits (n, vocab) in float64 of a transformers LlamaForCausalLM for one row of ids (n,).

    Only the weights and the sizes of the config are used. `scale(query position)` multiplies the scores of a query
    (YaRN: the square of its attention factor; log-n scaling: its query scale), `angle_of_layer(l)` replaces `angle`,
    `bias_of_layer(l)` the bias.
    """
    config = model.config
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    n = len(ids)
    positions = list(range(n)) if positions is None else positions
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        layer_angle = angle_of_layer(layer) if angle_of_layer else angle
        bias = bias_of_layer(layer) if bias_of_layer else bias

        def linear(states, name, layer=layer):
            return states @ weights[f"model.layers.{layer}.{name}.weight"].T

        normed = rms_norm(hidden, weights[f"model.layers.{layer}.input_layernorm.weight"], config.rms_norm_eps)
        query = linear(normed, "self_attn.q_proj").view(n, heads, dim).transpose(0, 1)
        key = linear(normed, "self_attn.k_proj").view(n, kv_heads, dim).transpose(0, 1)
        value = linear(normed, "self_attn.v_proj").view(n, kv_heads, dim).transpose(0, 1)
        key, value = (states.repeat_interleave(heads // kv_heads, 0) for states in (key, value))
        attended = torch.zeros(n, heads, dim, dtype=torch.float64)
        for row, i in enumerate(positions):
            seen = [c for c in range(row + 1) if window is None or i - positions[c] < window]
            pairs = [layer_angle(i, positions[column]) for column in seen]
            query_angles = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64)
            key_angles = torch.tensor([pair[1] for pair in pairs], dtype=torch.float64)
            # One copy of the query per key, since a position map may turn it differently for each.
            left = rotate_rows(query[:, row : row + 1].expand(-1, len(seen), -1), query_angles)
            right = rotate_rows(key[:, seen], key_angles)
            scores = (left * right).sum(-1) * dim**-0.5 * scale(i)
            if bias is not None:
                scores = scores + torch.tensor([[bias(h, i, positions[c]) for c in seen] for h in range(heads)])
            attended[row] = (scores.softmax(-1)[..., None] * value[:, seen]).sum(1)
        hidden = hidden + linear(attended.reshape(n, heads * dim), "self_attn.o_proj")
        normed = rms_norm(
            hidden, weights[f"model.layers.{layer}.post_attention_layernorm.weight"], config.rms_norm_eps
        )
        gate = linear(normed, "mlp.gate_proj")
        hidden = hidden + linear(gate * gate.sigmoid() * linear(normed, "mlp.up_proj"), "mlp.down_proj")
    hidden = rms_norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    return hidden @ weights["lm_head.weight"].T


def frequency_logits(model, ids: torch.Tensor, frequencies: Frequencies, factor: float = 1.0, **more) -> torch.Tensor:
    """Logits of a Llama with fixed frequencies and cos, sin multiplied by an attention factor."""
    return llama_logits(model, ids, by_frequencies(frequencies), scale=lambda i: factor**2, **more)


def dynamic_logits(model, ids: torch.Tensor, frequencies_of_length: Callable, **more) -> torch.Tensor:
    """Logits of a Llama where query i uses the frequencies of length i + 1 for itself and for every key.

    `frequencies_of_length(n)` returns frequencies, or (frequencies, attention factor). Rounding to a granularity is
    the caller's: `lambda n: dynamic_ntk(rounded_length(n, L, granularity), ...)`.
    """

    def parts(n: int) -> tuple[Frequencies, float]:
        found = frequencies_of_length(n)
        return found if isinstance(found, tuple) else (found, 1.0)

    angle = by_length(lambda n: parts(n)[0])
    return llama_logits(model, ids, angle, scale=lambda i: parts(i + 1)[1] ** 2, **more)


# --- a whole BLOOM ---------------------------------------------------------------------------------------------------


def bloom_logits(
    model,
    ids: torch.Tensor,
    *,
    angle: Angle | None = None,
    bias: Callable[[int, int, int, int], float] | None = None,
    scale: Callable[[int], float] = lambda i: 1.0,
) -> torch.Tensor:
    """Logits (n, vocab) in float64 of a transformers BloomForCausalLM for one row of ids (n,), key by key.

    Only the weights and the sizes of the config are used. `angle` turns queries and keys, `bias(layer, head, i, j)` is
    added to a score; without either the model has no positions. `scale(i)` multiplies the scores of query i.
    """
    config = model.config
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    heads, n, epsilon = config.n_head, len(ids), config.layer_norm_epsilon
    dim = config.hidden_size // heads
    post = config.apply_residual_connection_post_layernorm

    def linear(states, name):
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(states, name):
        return layer_norm(states, weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon)

    hidden = weights["transformer.word_embeddings.weight"][ids]
    hidden = norm(hidden, "transformer.word_embeddings_layernorm")
    for layer in range(config.n_layer):
        block = f"transformer.h.{layer}"
        normed = norm(hidden, f"{block}.input_layernorm")
        fused = linear(normed, f"{block}.self_attention.query_key_value").view(n, heads, 3, dim)
        query, key, value = (fused[:, :, part].transpose(0, 1) for part in range(3))
        attended = torch.zeros(n, heads, dim, dtype=torch.float64)
        for i in range(n):
            left, right = query[:, i : i + 1].expand(-1, i + 1, -1), key[:, : i + 1]
            if angle is not None:
                pairs = [angle(i, j) for j in range(i + 1)]
                left = rotate_rows(left, torch.tensor([pair[0] for pair in pairs], dtype=torch.float64))
                right = rotate_rows(right, torch.tensor([pair[1] for pair in pairs], dtype=torch.float64))
            scores = (left * right).sum(-1) * dim**-0.5 * scale(i)
            if bias is not None:
                terms = [[bias(layer, head, i, j) for j in range(i + 1)] for head in range(heads)]
                scores = scores + torch.tensor(terms, dtype=torch.float64)
            attended[i] = (scores.softmax(-1)[..., None] * value[:, : i + 1]).sum(1)
        hidden = (normed if post else hidden) + linear(attended.reshape(n, -1), f"{block}.self_attention.dense")
        normed = norm(hidden, f"{block}.post_attention_layernorm")
        inner = linear(normed, f"{block}.mlp.dense_h_to_4h")
        inner = inner * 0.5 * (1 + torch.tanh(0.79788456 * inner * (1 + 0.044715 * inner * inner)))
        hidden = (normed if post else hidden) + linear(inner, f"{block}.mlp.dense_4h_to_h")
    hidden = norm(hidden, "transformer.ln_f")
    return hidden @ weights["lm_head.weight"].T


# --- absolute positions, and models that have a table of them --------------------------------------------------------


def sinusoid(t: float, width: int, base: float = 10000.0) -> list[float]:
    """p(t) of "Attention is all you need": even dimensions are sines, odd ones cosines."""
    angles = [t / base ** (2 * (dimension // 2) / width) for dimension in range(width)]
    return [math.cos(angle) if dimension % 2 else math.sin(angle) for dimension, angle in enumerate(angles)]


def cubic_kernel(x: float, a: float = -0.75) -> float:
    """Keys' cubic convolution."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def stretched(
    table: list[list[float]], count: int, interpolation: str = "linear", keep_head: bool = False
) -> list[list[float]]:
    """A table of L rows made `count` long, first on first and last on last; copies start again instead."""
    length, rows = len(table), []
    for t in range(count):
        place = t * (length - 1) / (count - 1) if count > 1 else 0.0
        if interpolation == "copy":
            weights = {t % length: 1.0}
        elif keep_head and t < length:
            weights = {t: 1.0}
        else:
            weights = {}
            for row in range(math.floor(place) - 1, math.floor(place) + 3):
                distance = place - row
                near = max(0.0, 1 - abs(distance)) if interpolation == "linear" else cubic_kernel(distance)
                inside = min(max(row, 0), length - 1)
                weights[inside] = weights.get(inside, 0.0) + near
        rows.append([sum(weight * table[row][d] for row, weight in weights.items()) for d in range(len(table[0]))])
    return rows


def layer_norm(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    centred = hidden - hidden.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    angle: Angle | None,
    bias: Callable[[int, int, int], float] | None,
    causal: bool,
    factor: float,
) -> torch.Tensor:
    """Attention of rows (n, heads * dim), row by row; `factor` is that on cos and sin."""
    n, dim = query.shape[0], query.shape[1] // heads
    query, key, value = (states.view(n, heads, dim).transpose(0, 1) for states in (query, key, value))
    output = torch.zeros(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        seen = range(i + 1) if causal else range(n)
        left, right = query[:, i : i + 1].expand(-1, len(seen), -1), key[:, : len(seen)]
        if angle is not None:
            pairs = [angle(i, j) for j in seen]
            left = rotate_rows(left, torch.tensor([pair[0] for pair in pairs], dtype=torch.float64))
            right = rotate_rows(right, torch.tensor([pair[1] for pair in pairs], dtype=torch.float64))
        scores = (left * right).sum(-1) * dim**-0.5 * factor**2
        if bias is not None:
            scores = scores + torch.tensor([[bias(h, i, j) for j in seen] for h in range(heads)])
        output[i] = (scores.softmax(-1)[..., None] * value[:, : len(seen)]).sum(1)
    return output.reshape(n, heads * dim)


def table_model_logits(
    model,
    ids: torch.Tensor,
    table: list[list[float]] | None,
    *,
    angle: Angle | None = None,
    bias_of_layer: Callable[[int], Callable] | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Logits (n, vocab) in float64 of a GPT-2, OPT or BERT for one row of ids (n,), from its weights alone.

    `table` holds the vector that is added at every position, None for none at all. A BERT whose config says
    `is_decoder` is causal.
    """
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    config, kind = model.config, model.config.model_type
    n, heads = len(ids), config.num_attention_heads
    added = 0.0 if table is None else torch.tensor(table[:n], dtype=torch.float64)

    def linear(states, name):
        if kind == "gpt2":  # stored the other way round
            return states @ weights[f"{name}.weight"] + weights[f"{name}.bias"]
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(states, name):
        return layer_norm(states, weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon)

    def attention(query, key, value, causal):
        bias = bias_of_layer(layer) if bias_of_layer else None
        return attended(query, key, value, heads, angle, bias, causal, factor)

    if kind == "gpt2":
        epsilon, hidden = config.layer_norm_epsilon, weights["transformer.wte.weight"][ids] + added
        for layer in range(config.num_hidden_layers):
            block = f"transformer.h.{layer}"
            parts = linear(norm(hidden, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
            hidden = hidden + linear(attention(*parts, True), f"{block}.attn.c_proj")
            inner = gelu_new(linear(norm(hidden, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
            hidden = hidden + linear(inner, f"{block}.mlp.c_proj")
        return norm(hidden, "transformer.ln_f") @ weights["lm_head.weight"].T
    if kind == "opt":
        epsilon, hidden = 1e-5, weights["model.decoder.embed_tokens.weight"][ids] + added
        for layer in range(config.num_hidden_layers):
            block = f"model.decoder.layers.{layer}"
            normed = norm(hidden, f"{block}.self_attn_layer_norm")
            parts = [linear(normed, f"{block}.self_attn.{name}_proj") for name in "qkv"]
            hidden = hidden + linear(attention(*parts, True), f"{block}.self_attn.out_proj")
            inner = linear(norm(hidden, f"{block}.final_layer_norm"), f"{block}.fc1").clamp(min=0)
            hidden = hidden + linear(inner, f"{block}.fc2")
        return norm(hidden, "model.decoder.final_layer_norm") @ weights["lm_head.weight"].T
    epsilon = config.layer_norm_eps
    hidden = weights["bert.embeddings.word_embeddings.weight"][ids] + added
    hidden = norm(hidden + weights["bert.embeddings.token_type_embeddings.weight"][0], "bert.embeddings.LayerNorm")
    for layer in range(config.num_hidden_layers):
        block = f"bert.encoder.layer.{layer}"
        parts = [linear(hidden, f"{block}.attention.self.{name}") for name in ("query", "key", "value")]
        mixed = linear(attention(*parts, config.is_decoder), f"{block}.attention.output.dense")
        hidden = norm(hidden + mixed, f"{block}.attention.output.LayerNorm")
        inner = gelu(linear(hidden, f"{block}.intermediate.dense"))
        hidden = norm(hidden + linear(inner, f"{block}.output.dense"), f"{block}.output.LayerNorm")
    hidden = norm(gelu(linear(hidden, "cls.predictions.transform.dense")), "cls.predictions.transform.LayerNorm")
    return hidden @ weights["cls.predictions.decoder.weight"].T + weights["cls.predictions.bias"]


# --- a whole T5 ------------------------------------------------------------------------------------------------------


def t5_resized(side: list[float], longest: int, buckets: int, new_longest: int) -> list[float]:
    """One head's table for the distances of one side, for another number of buckets: each takes the mean of the
    trained biases of the distances up to `new_longest` that fall into it, an empty one what the one before has."""
    resized: list[float] = []
    for bucket in range(buckets):
        mine = [D for D in range(new_longest + 1) if t5_bucket(D, buckets, new_longest, True) == bucket]
        found = [side[t5_bucket(D, len(side), longest, True)] for D in mine]
        resized.append(sum(found) / len(found) if found else resized[-1])
    return resized


def t5_logits(
    model,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: Callable[[bool, int, int, int, int], float] | None = None,
    angle: Angle | None = None,
    scale: Callable[[int], float] = lambda i: 1.0,
) -> torch.Tensor:
    """Logits (m, vocab) in float64 of a T5ForConditionalGeneration for one source row (n,) and one target row (m,).

    `bias(decoder, layer, head, i, j)` is added to the scores of self-attention, where `angle` turns queries and keys
    and `scale(i)` is the factor on products. Scores of cross-attention are plain products.
    """
    config = model.config
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    heads, dim = config.num_heads, config.d_kv

    def split(states: torch.Tensor) -> torch.Tensor:
        return states.view(len(states), heads, dim).transpose(0, 1)

    def attend(name: str, states: torch.Tensor, memory: torch.Tensor, decoder: bool, layer: int, own: bool):
        query, key, value = (
            split(given @ weights[f"{name}.{part}.weight"].T)
            for part, given in (("q", states), ("k", memory), ("v", memory))
        )
        attended = torch.zeros(len(states), heads, dim, dtype=torch.float64)
        for i in range(len(states)):
            seen = list(range(i + 1 if own and decoder else len(memory)))
            left, right = query[:, i : i + 1].expand(-1, len(seen), -1), key[:, seen]
            if own and angle is not None:
                pairs = [angle(i, j) for j in seen]
                left, right = (
                    rotate_rows(part, torch.tensor([pair[side] for pair in pairs], dtype=torch.float64))
                    for side, part in enumerate((left, right))
                )
            scores = (left * right).sum(-1) * (scale(i) if own else 1.0)
            if own and bias is not None:
                scores = scores + torch.tensor(
                    [[bias(decoder, layer, h, i, j) for j in seen] for h in range(heads)], dtype=torch.float64
                )
            attended[i] = (scores.softmax(-1)[..., None] * value[:, seen]).sum(1)
        return attended.reshape(len(states), heads * dim) @ weights[f"{name}.o.weight"].T

    def feed_forward(name: str, states: torch.Tensor) -> torch.Tensor:
        if f"{name}.wi.weight" in weights:
            inner = (states @ weights[f"{name}.wi.weight"].T).relu()
        else:
            inner = gelu_new(states @ weights[f"{name}.wi_0.weight"].T) * (states @ weights[f"{name}.wi_1.weight"].T)
        return inner @ weights[f"{name}.wo.weight"].T

    def stack(name: str, ids: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        hidden = weights["shared.weight"][ids]
        for layer in range(config.num_layers if memory is None else config.num_decoder_layers):
            base = f"{name}.block.{layer}.layer"

            def norm(sublayer: int, states: torch.Tensor, base=base) -> torch.Tensor:
                return rms_norm(states, weights[f"{base}.{sublayer}.layer_norm.weight"], config.layer_norm_epsilon)

            normed = norm(0, hidden)
            hidden = hidden + attend(f"{base}.0.SelfAttention", normed, normed, memory is not None, layer, True)
            if memory is not None:
                hidden = hidden + attend(f"{base}.1.EncDecAttention", norm(1, hidden), memory, True, layer, False)
            last = 1 if memory is None else 2
            hidden = hidden + feed_forward(f"{base}.{last}.DenseReluDense", norm(last, hidden))
        return rms_norm(hidden, weights[f"{name}.final_layer_norm.weight"], config.layer_norm_epsilon)

    hidden = stack("decoder", target, stack("encoder", source, None))
    if getattr(config, "scale_decoder_outputs", False):  # mT5 never does
        hidden = hidden * config.d_model**-0.5
    return hidden @ weights["lm_head.weight"].T
