"""A Transformer, embedding to head, in one file, to be read from top to bottom; a first sitting ends with the loss.

    Config        every size and every switch; FAMILIES says how GPT-2, Llama, Mistral, ... set them
    the path      norm -> rotary positions -> attention -> MLP -> block -> Transformer -> loss
    the parts     mixture of experts (in place of the MLP), latent attention (in place of attention)
    inference     the KV cache, the paged KV cache, picking a token, generate
    arithmetic    FLOPs and cache bytes of a token

Shape comments use these letters (in code, F is torch.nn.functional):
    B rows        T tokens in this call     S tokens visible, cached and new     V vocabulary
    C n_embd      H query heads             K key/value heads                    D head width
    F MLP width   E experts                 A experts a token visits             L layers
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """Sizes and switches, by default the Llama block's; most zeros mean derived or off. Bad values raise ValueError."""
    vocab_size: int = 256        # token ids that exist
    vocab_multiple: int = 1      # rows of embedding and head are padded to a multiple of this; 64 suits a GPU
    block_size: int = 1024       # longest sequence, in tokens
    n_layer: int = 6             # blocks
    n_head: int = 6              # query heads
    n_kv_head: int = 0           # key/value heads: 0 means n_head (MHA); 1 is MQA; between them GQA
    n_embd: int = 384            # width of the residual stream
    head_dim: int = 0            # width of a head; 0: n_embd / n_head
    d_ff: int = 0                # width of the MLP; 0: 4 n_embd, for swiglu 8/3 n_embd up to the next 128
    norm: str = 'rms'            # rms (RMSNorm) or layer (LayerNorm)
    norm_eps: float = 1e-5       # added to the variance
    mlp: str = 'swiglu'          # swiglu, gelu (exact, by erf) or gelu_tanh (GPT-2's approximation)
    bias: bool = False           # biases in every linear layer and LayerNorm, the head and the router aside
    qkv_bias: bool = False       # biases in the query, key and value projection alone
    qk_norm: bool = False        # RMSNorm on each head's queries and keys, before they are rotated
    wiring: str = 'pre'          # pre: x + f(norm(x)); post: norm(x + f(x)); parallel: x + attn(norm(x)) + mlp(norm(x))
    tie: bool = False            # the head shares the embedding's matrix
    dropout: float = 0.0         # on the embedding and on what each part adds to the residual stream
    pos: str = 'rope'            # rope (rotary) or learned (a vector a position)
    rope_base: float = 10000.0   # the slowest pair turns once in about 2 pi times as many tokens
    rope_scaling: str = ''       # linear,factor | llama3,factor,low,high,length | yarn,factor,length,fast,slow,m,m_all
    window: int = 0              # keys a query sees, itself included; 0: all before it
    causal: bool = True          # false: an encoder, every token sees every token; no loss, no cache, no generation
    n_expert: int = 0            # experts in place of the MLP; 0: one plain MLP
    n_active: int = 2            # experts a token visits
    n_shared: int = 0            # experts that every token visits besides
    d_expert: int = 0            # width of an expert; 0: d_ff
    n_dense: int = 0             # first layers that keep the plain MLP
    norm_topk: bool = True       # the weights of the experts visited sum to 1
    expert_scale: float = 1.0    # factor on those weights
    balance: float = 0.01        # weight of the load-balance term, in training only
    kv_rank: int = 0             # latent attention: width of the latent that keys and values come from; 0: off
    q_rank: int = 0              # latent attention: width of the queries' latent; 0: queries come straight from x
    rope_dim: int = 0            # latent attention: rotated part of head_dim; its key is shared by all heads
    v_dim: int = 0               # latent attention: width of a value head; 0: head_dim

    def __post_init__(self):
        at_least_1 = ('vocab_size', 'vocab_multiple', 'block_size', 'n_layer', 'n_head', 'n_embd', 'n_active')
        for name, value in vars(self).items():
            least = 1 if name in at_least_1 else 0
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise ValueError(f'{name} is {value}, but must be at least {least}')
        for name, known in dict(norm=('rms', 'layer'), mlp=('swiglu', 'gelu', 'gelu_tanh'),
                                wiring=('pre', 'post', 'parallel'), pos=('rope', 'learned')).items():
            if getattr(self, name) not in known:
                raise ValueError(f'{name} is {getattr(self, name)!r}, but must be one of {", ".join(known)}')
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(f'n_embd {self.n_embd} is no multiple of n_head {self.n_head}: change one or set head_dim')
        self.n_kv_head, self.head_dim = self.n_kv_head or self.n_head, self.head_dim or self.n_embd // self.n_head
        self.d_ff = self.d_ff or (math.ceil(self.n_embd * 8/3 / 128) * 128 if self.mlp == 'swiglu' else 4 * self.n_embd)
        self.d_expert, self.v_dim = self.d_expert or self.d_ff, self.v_dim or self.head_dim
        self.vocab_rows = -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple  # of embedding and head
        for wrong, sentence in conflicts(self):  # rules on several fields, the last function of this file
            if wrong:
                raise ValueError(sentence)
        rope_frequencies(self)  # refuses a rope_scaling that it can't read


FAMILIES = {  # what differs from the default; ranks, windows and experts in sizes that suit a small model
    'gpt1': dict(norm='layer', bias=True, pos='learned', mlp='gelu_tanh', tie=True, wiring='post'),
    'gpt2': dict(norm='layer', bias=True, pos='learned', mlp='gelu_tanh', tie=True),    # GPT-3 too, but dense
    'llama': dict(),
    'llama3': dict(n_kv_head=2, rope_base=5e5),
    'llama3.1': dict(n_kv_head=2, rope_base=5e5, rope_scaling='llama3,8,1,4,8192'),
    'mistral': dict(n_kv_head=2, window=32),
    'mixtral': dict(n_kv_head=2, rope_base=1e6, n_expert=8),
    'qwen2': dict(n_kv_head=2, rope_base=1e6, norm_eps=1e-6, qkv_bias=True),
    'qwen3': dict(n_kv_head=2, rope_base=1e6, norm_eps=1e-6, qk_norm=True),
    'deepseek': dict(norm_eps=1e-6, head_dim=48, rope_dim=16, v_dim=32, kv_rank=64,
                     n_expert=8, n_shared=2, n_dense=1, d_expert=128, norm_topk=False, balance=0.001),
    'palm': dict(n_kv_head=1, norm='layer', wiring='parallel', tie=True),
    'encoder': dict(norm='layer', bias=True, pos='learned', mlp='gelu', causal=False),  # ViT, and Whisper's encoder
}

# ---------------------------------------------------------------------------------------------------------------------
# The path every token takes


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in fp32 whatever comes in."""

    def __init__(self, cfg, width, kind=''):
        super().__init__()
        self.kind, self.eps = kind or cfg.norm, cfg.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if cfg.bias and self.kind == 'layer' else None

    def forward(self, x):
        weight, bias = (p if p is None else p.float() for p in (self.weight, self.bias))
        if self.kind == 'rms':
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)


def rope_frequencies(cfg, device=None):
    """Radians a position of each rotated pair, (D/2,), and a factor on cos and sin that only YaRN sets."""
    width = cfg.rope_dim if cfg.kv_rank else cfg.head_dim
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    freq = cfg.rope_base ** (-steps / width)                             # (D/2,)
    return scale_frequencies(cfg, freq) if cfg.rope_scaling else (freq, 1.0)


class Rope(nn.Module):
    """Rotary positions (arXiv:2104.09864): pair i of a head, (x[i], x[i + D/2]), turns by position * frequency[i].
    The tables follow the model's device but are never cast: in bf16 positions 2045 and 2047 are the same."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.build(None)

    def build(self, device):
        freq, factor = rope_frequencies(self.cfg, device)
        angle = torch.outer(torch.arange(self.cfg.block_size, device=freq.device).float(), freq)  # (T_max, D/2)
        self.register_buffer('cos', angle.cos() * factor, persistent=False)
        self.register_buffer('sin', angle.sin() * factor, persistent=False)

    def _apply(self, fn, recurse=True):  # .to(), .to_empty(), .half(), ... land here
        try:  # where would fn put the tables?
            device = fn(self.cos.new_empty(0)).device
        except NotImplementedError:  # nothing can be copied from meta
            device = fn(torch.empty(0)).device
        if device != self.cos.device:
            self.build(device)
        return self

    def forward(self, x, pos):
        cos, sin = self.cos[pos][:, :, None], self.sin[pos][:, :, None]  # (1 or B, T, 1, D/2)
        a, b = x.float().chunk(2, dim=-1)                                # (B, T, heads, D/2) each
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Fused(nn.Linear):
    """Several matrices with one input, stacked into one product, for fewer launches. Returns a tensor per role."""

    def __init__(self, width, roles, bias=False):
        super().__init__(width, sum(roles), bias)
        self.roles = roles

    def forward(self, x):
        return super().forward(x).split(self.roles, dim=-1)


def attend(q, k, v, mask, causal, scale=None):
    """softmax(scale * q k^T) v; scale None is 1/sqrt(D). CUDA's flash kernel takes causal or not, but never a mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): H / K query heads share each key/value head."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.layer, self.rope, self.causal = layer, rope, cfg.causal
        self.head_dim, H, K = cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.w_qkv = Fused(cfg.n_embd, [n * cfg.head_dim for n in (H, K, K)], cfg.bias or cfg.qkv_bias)
        self.w_out = nn.Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=cfg.bias)
        self.q_norm = Norm(cfg, cfg.head_dim, 'rms') if cfg.qk_norm else nn.Identity()
        self.k_norm = Norm(cfg, cfg.head_dim, 'rms') if cfg.qk_norm else nn.Identity()

    def forward(self, x, pos, mask, cache):
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.w_qkv(x))  # (B, T, H, D), (B, T, K, D) twice
        q, k = self.rope(self.q_norm(q), pos), self.rope(self.k_norm(k), pos)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, K, T, D) twice
        if cache is not None:
            k, v = cache.update(self.layer, k, v)                    # (B, K, S, D) twice
        y = attend(q, k, v, mask, self.causal)                       # (B, H, T, D)
        return self.w_out(y.transpose(1, 2).flatten(2))              # (B, T, C)


def swiglu(gate, up):  # arXiv:2002.05202
    return F.silu(gate) * up


class MLP(nn.Module):
    """Up to the wider F, a nonlinearity, and down again."""

    def __init__(self, cfg, width):
        super().__init__()
        n_up, self.act = {'swiglu': (2, swiglu), 'gelu': (1, F.gelu), 'gelu_tanh': (1, nn.GELU('tanh'))}[cfg.mlp]
        self.w_up = Fused(cfg.n_embd, [width] * n_up, cfg.bias)  # gate and up, or up alone
        self.w_down = nn.Linear(width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        return self.w_down(self.act(*self.w_up(x)))                 # (B, T, F) inside, (B, T, C) out


class Block(nn.Module):
    """Tokens look at each other (attention), then each is worked on alone (MLP); both add to the residual stream."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.wiring = cfg.wiring
        self.attn_norm = Norm(cfg, cfg.n_embd)
        self.attn = (LatentAttention if cfg.kv_rank else Attention)(cfg, layer, rope)
        self.mlp_norm = None if cfg.wiring == 'parallel' else Norm(cfg, cfg.n_embd)
        self.mlp = MixtureOfExperts(cfg) if cfg.n_expert and layer >= cfg.n_dense else MLP(cfg, cfg.d_ff)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, pos, mask, cache):
        if self.wiring == 'pre':
            x = x + self.drop(self.attn(self.attn_norm(x), pos, mask, cache))
            return x + self.drop(self.mlp(self.mlp_norm(x)))
        if self.wiring == 'post':
            x = self.attn_norm(x + self.drop(self.attn(x, pos, mask, cache)))
            return self.mlp_norm(x + self.drop(self.mlp(x)))
        n = self.attn_norm(x)  # parallel: one norm, both parts read it
        return x + self.drop(self.attn(n, pos, mask, cache) + self.mlp(n))


@torch.no_grad()
def init_weights(model):
    """GPT-2's: normal(0, 0.02); a block's two matrices that write to the residual stream get 1/sqrt(2 L) of that."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            writes = 'w_out' in name or 'w_down' in name
            p.normal_(0, 0.02 / math.sqrt(2 * model.cfg.n_layer) if writes else 0.02)
        else:
            p.fill_(0 if name.endswith('bias') else 1)


class Transformer(nn.Module):
    """The whole model. `model(idx, targets)` is training, `model(idx, cache=cache)` is inference."""
    logits_at_once = 2 ** 26  # the loss of more logits than this (256 MiB in fp32) goes through chunks of tokens

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_rows, cfg.n_embd)
        self.embed_pos = nn.Embedding(cfg.block_size, cfg.n_embd) if cfg.pos == 'learned' else None
        self.drop = nn.Dropout(cfg.dropout)
        rope = Rope(cfg) if cfg.pos == 'rope' else lambda x, pos: x
        self.blocks = nn.ModuleList(Block(cfg, layer, rope) for layer in range(cfg.n_layer))
        self.norm = nn.Identity() if cfg.wiring == 'post' else Norm(cfg, cfg.n_embd)
        self.lm_head = None if cfg.tie else nn.Linear(cfg.n_embd, cfg.vocab_rows, bias=False)
        init_weights(self)

    def hidden(self, x, cache=None):
        """Ids (B, T), or embeddings (B, T, C), to the last block's normed output (B, T, C). A cache gains T tokens."""
        T = x.shape[1]
        if T > self.cfg.block_size:
            raise ValueError(f'{T} tokens are more than block_size {self.cfg.block_size}')
        if cache is not None and len(x) != len(cache.lengths):
            raise ValueError(f'{len(x)} rows of tokens do not fit a cache of {len(cache.lengths)} rows')
        pos = torch.arange(T, device=x.device)[None] if cache is None else cache.extend(T)  # (1 or B, T)
        S = T if cache is None else cache.visible
        mask = None  # attend's is_causal is enough, and lets CUDA's flash kernel run, which takes no mask,
        if S > T or self.cfg.window:  # but not with a window, nor after cached tokens: it puts query 0 at slot 0
            query, key = pos[:, None, :, None], torch.arange(S, device=x.device)  # (1 or B, 1, T, 1), (S,)
            mask = (key <= query) & (key > query - (self.cfg.window or S))        # (1 or B, 1, T, S)
        if not x.is_floating_point():
            x = self.embed(x)                                        # (B, T, C)
        if self.embed_pos is not None:
            x = x + self.embed_pos(pos)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, pos, mask, cache)
        return self.norm(x)

    def head(self, x):
        """(..., C) to logits (..., V); the rows that only pad the vocabulary are cut off."""
        x = F.linear(x, self.embed.weight) if self.lm_head is None else self.lm_head(x)  # (..., rows of the embedding)
        return x[..., :self.cfg.vocab_size]                          # (..., V)

    def nll(self, x, targets):
        """Negative log-likelihood, summed in fp32, of the targets (N,) after x (N, C)."""
        return F.cross_entropy(self.head(x).float(), targets, ignore_index=-1, reduction='sum')

    def loss(self, x, targets):
        """Mean of nll over the targets that are not -1; 0 without any. Large logits are made in chunks, never whole."""
        x, targets = x.flatten(0, 1), targets.flatten()              # (B * T, C), (B * T,)
        n = max(1, self.logits_at_once // self.cfg.vocab_size)       # tokens of a chunk
        # a chunk's logits are made again in the backward pass
        nll = self.nll if len(x) <= n else partial(checkpoint, self.nll, use_reentrant=False)
        total = sum(nll(*chunk) for chunk in zip(x.split(n), targets.split(n)))
        return total / (targets != -1).sum().clamp(min=1)

    def forward(self, idx, targets=None, cache=None, all_logits=False):
        """Ids (B, T) to (logits, None), of the last position (B, 1, V) or of all (B, T, V). With targets (B, T), -1 for
        none, to (None, loss): nats per target, in training plus the experts' balance term."""
        x = self.hidden(idx, cache)
        if targets is None:
            return self.head(x if all_logits else x[:, -1:]), None
        if not self.cfg.causal:
            raise ValueError('causal=false: each token sees its target, so there is no next-token loss')
        loss = self.loss(x, targets)
        if self.training and self.cfg.n_expert:  # each MixtureOfExperts has left its term: popped, no graph stays
            weight = (targets != -1).sum(1)                          # (B,): rows count as their targets do in the loss
            balance = sum(vars(block.mlp).pop('balance', 0) for block in self.blocks[self.cfg.n_dense:])  # (B,)
            loss = loss + self.cfg.balance * (balance * weight).sum() / weight.sum().clamp(min=1)
        return None, loss

# ---------------------------------------------------------------------------------------------------------------------
# Parts that replace a part


def yarn_mscale(factor, mscale):
    """How much YaRN sharpens attention over `factor` times the trained length (arXiv:2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1


def scale_frequencies(cfg, freq):
    """Rotations for longer texts than the model was trained on: (D/2,) frequencies to (D/2,) and a factor."""
    kind, *numbers = cfg.rope_scaling.split(',')
    width = 2 * len(freq)
    try:
        numbers = [float(n) for n in numbers]
        if not all(0 <= n < math.inf for n in numbers) or numbers[0] < 1:
            raise ValueError
        if kind == 'linear':       # positions squeezed into the trained length (arXiv:2306.15595)
            (factor,) = numbers
            return freq / factor, 1.0
        if kind == 'llama3':       # slow pairs squeezed, fast ones kept, a ramp between (Llama 3.1's reference code)
            factor, low, high, length = numbers
            turns = length * freq / (2 * math.pi)                        # (D/2,), of each pair over the trained length
            keep = ((turns - low) * (1 / (high - low))).clamp(0, 1)      # as floats: 1 / 0 raises
            return freq * (keep + (1 - keep) / factor), 1.0
        if kind == 'yarn':         # the same, the ramp drawn over the pairs' indices (arXiv:2309.00071)
            factor, length, fast, slow, mscale, mscale_all_dim = numbers
            first, last = (width * math.log(length / (2 * math.pi * times)) / (2 * math.log(cfg.rope_base))
                           for times in (fast, slow))                    # the pair that turns so often in the length
            first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
            squeeze = ((torch.arange(len(freq), device=freq.device) - first) / max(last - first, 0.001)).clamp(0, 1)
            sharpen = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
            return freq * (1 - squeeze + squeeze / factor), sharpen
    except (ValueError, ZeroDivisionError, IndexError):
        pass
    raise ValueError(f'rope_scaling is {cfg.rope_scaling!r}, but must be linear,factor or '
                     'llama3,factor,low,high,length or yarn,factor,length,fast,slow,mscale,mscale_all_dim')


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). A token leaves one latent of kv_rank numbers, from
    which every head makes its key and value, and one rotated key that all heads share. Two forms, one result:
    expanded (training, prefill) makes keys and values; absorbed (decode) moves w_kv's matrices to the query and the
    output instead, so that attention reads the latents themselves, as MQA with wide heads."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.layer, self.rope, self.causal = layer, rope, cfg.causal
        self.n_head, self.v_dim, self.rank = cfg.n_head, cfg.v_dim, cfg.kv_rank
        self.q_split = cfg.head_dim - cfg.rope_dim, cfg.rope_dim         # P + R = D: plain and rotated dimensions
        kind, *numbers = cfg.rope_scaling.split(',')
        sharpen = yarn_mscale(float(numbers[0]), float(numbers[-1])) if kind == 'yarn' else 1.0
        self.scale = sharpen ** 2 / math.sqrt(cfg.head_dim)              # once for the query, once for the key
        self.w_q_latent = nn.Linear(cfg.n_embd, cfg.q_rank, bias=False) if cfg.q_rank else nn.Identity()
        self.q_norm = Norm(cfg, cfg.q_rank, 'rms') if cfg.q_rank else nn.Identity()
        self.w_q = nn.Linear(cfg.q_rank or cfg.n_embd, cfg.n_head * cfg.head_dim, bias=False)
        self.w_kv_latent = Fused(cfg.n_embd, [cfg.kv_rank, cfg.rope_dim])
        self.kv_norm = Norm(cfg, cfg.kv_rank, 'rms')
        self.w_kv = Fused(cfg.kv_rank, [cfg.n_head * self.q_split[0], cfg.n_head * cfg.v_dim])
        self.w_out = nn.Linear(cfg.n_head * cfg.v_dim, cfg.n_embd, bias=False)

    def forward(self, x, pos, mask, cache):
        q = self.w_q(self.q_norm(self.w_q_latent(x))).unflatten(-1, (self.n_head, -1))  # (B, T, H, D)
        q, q_rope = q.split(self.q_split, dim=-1)                        # (B, T, H, P), (B, T, H, R)
        q, q_rope = q.transpose(1, 2), self.rope(q_rope, pos).transpose(1, 2)  # (B, H, T, P), (B, H, T, R)
        latent, k_rope = self.w_kv_latent(x)                           # (B, T, rank), (B, T, R)
        latent = self.kv_norm(latent)[:, None]                           # (B, 1, T, rank)
        k_rope = self.rope(k_rope[:, :, None], pos).transpose(1, 2)      # (B, 1, T, R)
        if cache is not None:
            latent, k_rope = cache.update(self.layer, latent, k_rope)    # (B, 1, S, rank), (B, 1, S, R)
        form = self.absorbed if latent.shape[2] > x.shape[1] else self.expanded  # S > T: something was cached
        y = form(q, q_rope, latent, k_rope, mask)                      # (B, H, T, v_dim)
        return self.w_out(y.transpose(1, 2).flatten(2))                  # (B, T, C)

    def expanded(self, q, q_rope, latent, k_rope, mask):
        k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.w_kv(latent[:, 0]))
        q = torch.cat((q, q_rope), dim=-1)                               # (B, H, T, D)
        k = torch.cat((k, k_rope.expand(-1, self.n_head, -1, -1)), dim=-1)  # (B, H, S, D)
        v = F.pad(v, (0, k.shape[-1] - self.v_dim))                      # (B, H, S, D): flash wants one width
        return attend(q, k, v, mask, self.causal, self.scale)[..., :self.v_dim]  # (B, H, T, v_dim)

    def absorbed(self, q, q_rope, latent, k_rope, mask):
        w_k, w_v = (w.unflatten(0, (self.n_head, -1)) for w in self.w_kv.weight.split(self.w_kv.roles))
        q = torch.cat((q @ w_k, q_rope), dim=-1)                         # w_k (H, P, rank): (B, H, T, rank + R)
        k = torch.cat((latent, k_rope), dim=-1)                          # (B, 1, S, rank + R)
        y = attend(q, k, k, mask, self.causal, self.scale)[..., :self.rank]  # (B, H, T, rank): the keys are the values
        return y @ w_v.mT                                                # w_v (H, v_dim, rank): (B, H, T, v_dim)


class MixtureOfExperts(nn.Module):
    """A router sends each token to A of E experts, each an MLP, and adds what they say, weighted; shared experts hear
    every token (Mixtral, arXiv:2401.04088; DeepSeekMoE, arXiv:2401.06066). No token is ever dropped."""

    def __init__(self, cfg):
        super().__init__()
        self.n_active, self.norm_topk, self.scale = cfg.n_active, cfg.norm_topk, cfg.expert_scale
        self.router = nn.Linear(cfg.n_embd, cfg.n_expert, bias=False)
        self.w_up = nn.Parameter(torch.empty(cfg.n_expert, 2 * cfg.d_expert, cfg.n_embd))  # (E, 2F, C): gate and up
        self.w_down = nn.Parameter(torch.empty(cfg.n_expert, cfg.n_embd, cfg.d_expert))    # (E, C, F)
        self.roles = [cfg.d_expert] * 2                                  # of w_up's rows
        self.shared = MLP(cfg, cfg.n_shared * cfg.d_expert) if cfg.n_shared else None

    def forward(self, x):
        probs = self.router(x).float().softmax(-1)                       # (B, T, E)
        weight, chosen = probs.topk(self.n_active)                       # (B, T, A) twice
        if self.norm_topk:
            weight = weight / weight.sum(-1, keepdim=True)
        if self.training:  # Switch Transformer's term (arXiv:2101.03961, eq. 4), a row: 1 when experts are used alike
            share = F.one_hot(chosen, probs.shape[-1]).float().mean((1, 2))  # (B, E): of the row's visits
            self.balance = (share * probs.mean(1)).sum(-1) * probs.shape[-1]  # (B,)
        y = self.visit(x.flatten(0, 1), chosen.flatten(), weight.flatten() * self.scale).view_as(x)  # (B, T, C)
        return y if self.shared is None else y + self.shared(x)

    @torch.compiler.disable  # how many tokens each expert gets is known only at run time
    def visit(self, x, chosen, weight):
        """x (N, C), with the N * A visits' experts and weights, to (N, C). Each expert reads its tokens at once."""
        order = chosen.argsort(stable=True)                              # visits sorted by expert, (N * A,)
        token = order // self.n_active                                   # (N * A,)
        counts = chosen.bincount(minlength=len(self.w_up)).tolist()      # visits of each expert: E numbers
        y = torch.zeros_like(x)
        for w_up, w_down, rows, w in zip(self.w_up.unbind(), self.w_down.unbind(), token.split(counts),
                                         weight[order].split(counts)):
            if len(rows):
                out = F.linear(swiglu(*F.linear(x[rows], w_up).chunk(2, dim=-1)), w_down)  # (n, C)
                y.index_add_(0, rows, (out * w[:, None]).type_as(y))
        return y

# ---------------------------------------------------------------------------------------------------------------------
# Inference


def cache_shape(cfg, max_len=0):
    """What a token leaves in a layer: (heads, width) twice, of key and value or of latent and rotated key."""
    if not cfg.causal:
        raise ValueError('causal=false: an encoder sees all tokens at once, so it has no cache')
    if max_len > cfg.block_size:
        raise ValueError(f'a cache of {max_len} tokens is longer than block_size {cfg.block_size}')
    return ((1, cfg.kv_rank), (1, cfg.rope_dim)) if cfg.kv_rank else ((cfg.n_kv_head, cfg.head_dim),) * 2


class KVCache:
    """Keys and values of `batch` rows of up to max_len (T_max) tokens, allocated at once; four verbs: extend, update,
    truncate, repeat. Slot j holds position j. `static` is for a compiled step: attention reads all T_max slots and the
    mask hides those not yet written, so no shape changes from token to token; a row too long is then not refused."""

    def __init__(self, cfg, batch, max_len, device=None, dtype=None, static=False):
        self.max_len, self.static = max_len, static
        # a tensor a layer: a compiled step writes in place; zeros: a hidden slot weighs 0, but 0 * NaN is NaN
        self.k, self.v = ([torch.zeros(batch, heads, max_len, width, device=device, dtype=dtype)
                           for _ in range(cfg.n_layer)] for heads, width in cache_shape(cfg, max_len))
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens held by each row
        self.visible = 0                                                 # slots that attention reads: S

    def extend(self, T):
        """Room for T more tokens in every row; returns their positions (B, T). Once per forward, before update."""
        visible = self.max_len if self.static and self.visible else self.visible + T  # static from the second call on
        if visible > self.max_len:
            raise ValueError(f'{visible} tokens are more than the {self.max_len} that this cache has room for')
        self.visible = visible
        self.pos = self.lengths[:, None] + torch.arange(T, device=self.lengths.device)  # (B, T)
        self.lengths += T
        return self.pos

    def update(self, layer, k, v):
        """Stores a layer's new k, v (B, K, T, D) and returns all that is visible, (B, K, S, D). Once per layer."""
        row = torch.arange(len(self.pos), device=self.pos.device)[:, None]  # (B, 1)
        for store, new in ((self.k[layer], k), (self.v[layer], v)):
            store[row, :, self.pos] = new.transpose(1, 2).to(store.dtype)   # (B, T, K, D)
        return (store[layer][:, :, :self.visible].to(k.dtype) for store in (self.k, self.v))

    def truncate(self, length):
        """Forgets the tokens from position `length` on: an int, or one per row (B,)."""
        self.lengths.copy_(self.lengths.minimum(torch.as_tensor(length, device=self.lengths.device)))
        self.visible = self.max_len if self.static and self.lengths.any() else int(self.lengths.max())

    def repeat(self, n):
        """Each row n times, neighbours of each other: prefill a prompt once, sample it n times."""
        self.k, self.v = ([x.repeat_interleave(n, dim=0) for x in store] for store in (self.k, self.v))
        self.lengths = self.lengths.repeat_interleave(n)

    @property
    def nbytes(self):
        return sum(x.nbytes for x in self.k + self.v)


class PagedKVCache:
    """The same four verbs over a pool of n_blocks (0: for `batch` full rows) of `block` tokens: a row owns the blocks
    it has filled and gives them back on truncate. Saves memory, costs time: each update gathers the rows' blocks."""

    def __init__(self, cfg, batch, max_len, block=16, n_blocks=0, device=None, dtype=None):
        self.max_len, self.block = max_len, block
        n_blocks = n_blocks or batch * -(-max_len // block)
        self.k, self.v = (torch.zeros(cfg.n_layer, n_blocks, heads, block, width, device=device, dtype=dtype)
                          for heads, width in cache_shape(cfg, max_len))
        self.free = list(range(n_blocks))
        self.tables = [[] for _ in range(batch)]                         # each row's blocks, in order of position
        self.lengths, self.visible = [0] * batch, 0

    def reserve(self, lengths, tables):
        """Grows the rows' tables to hold these lengths, and adopts both; a refusal changes nothing."""
        need = [-(-n // self.block) - len(table) for n, table in zip(lengths, tables)]
        if max(lengths) > self.max_len:
            raise ValueError(f'{max(lengths)} tokens are more than the {self.max_len} that this cache allows a row')
        if sum(need) > len(self.free):
            raise ValueError(f'the cache needs {sum(need)} more blocks of {self.block} tokens, but {len(self.free)} of '
                             f'{self.k.shape[1]} are free: give it more blocks, or fewer or shorter rows')
        for n, table in zip(need, tables):
            table.extend(self.free.pop() for _ in range(n))
        self.tables, self.lengths, self.visible = tables, lengths, max(lengths)

    def extend(self, T):
        start = self.lengths
        self.reserve([n + T for n in start], self.tables)
        device, width = self.k.device, max(map(len, self.tables))
        pos = torch.tensor(start, device=device)[:, None] + torch.arange(T, device=device)            # (B, T)
        self.table = torch.tensor([t + [0] * (width - len(t)) for t in self.tables], device=device)   # (B, blocks)
        self.slot = self.table.gather(1, pos // self.block), pos % self.block                         # (B, T) twice
        return pos

    def update(self, layer, k, v):
        seen = []
        for pool, new in ((self.k[layer], k), (self.v[layer], v)):
            pool[self.slot[0], :, self.slot[1]] = new.transpose(1, 2).to(pool.dtype)                  # (B, T, K, D)
            blocks = pool[self.table].transpose(1, 2)                                  # (B, K, blocks, block, D)
            seen.append(blocks.flatten(2, 3)[:, :, :self.visible].to(new.dtype))                      # (B, K, S, D)
        return seen

    def truncate(self, length):
        keep = torch.as_tensor(length).expand(len(self.lengths)).tolist()
        self.lengths = [min(n, k) for n, k in zip(self.lengths, keep)]
        for n, table in zip(self.lengths, self.tables):
            while len(table) > -(-n // self.block):
                self.free.append(table.pop())
        self.visible = max(self.lengths)

    def repeat(self, n):
        source = [b for table in self.tables for _ in range(n) for b in table]
        tables = [table if i == 0 else [] for table in self.tables for i in range(n)]  # the first copy keeps its blocks
        self.reserve([length for length in self.lengths for _ in range(n)], tables)
        target = [b for table in self.tables for b in table]
        self.k[:, target], self.v[:, target] = self.k[:, source], self.v[:, source]

    @property
    def nbytes(self):
        return sum(map(len, self.tables)) * (self.k[:, :1].nbytes + self.v[:, :1].nbytes)


def pick(logits, noise, temperature=1.0, top_k=0, top_p=1.0):
    """One id a row, (B,), from logits (B, V) and one number in [0, 1) a row, (B,). Temperature 0 takes the likeliest.
    top_k keeps exactly that many (0: all); top_p keeps an id if the likelier ones sum to less than it
    (arXiv:1904.09751), so always the first. A row of logits without a finite maximum gives -1."""
    values = logits.float()                                              # (B, V)
    ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    best, choice = values.max(-1, keepdim=True)                          # (B, 1) twice; NaN wins a max
    if temperature > 0:
        if 0 < top_k < logits.shape[-1] or top_p < 1:
            values, ids = values.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # (B, k), falling
        probs = ((values - best) / max(temperature, 1e-30)).softmax(-1)  # fp32 rounds less to 0
        if top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs.where((before < top_p) | (before == 0), 0)
        total = probs.cumsum(-1)
        mark = noise[:, None] * (1 - 1e-6) * total[:, -1:]               # (B, 1), strictly below the total
        choice = ids.gather(1, torch.searchsorted(total, mark, right=True).clamp(max=total.shape[-1] - 1))
    return choice.where(best.isfinite(), -1)[:, 0]


def prefill(model, rows, cache):
    """Reads the rows, lists of ids, into an empty cache as one batch; returns the logits after each, (B, V). Rows are
    padded on the right, where their tokens can't see; truncate forgets the padding. A paged cache needs room for it."""
    lengths = torch.tensor([len(row) for row in rows], device=model.embed.weight.device)
    idx = nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)  # (B, T)
    x = model.hidden(idx.to(lengths.device), cache)                      # (B, T, C)
    cache.truncate(lengths)
    return model.head(x[torch.arange(len(rows), device=x.device), lengths - 1])  # (B, V)


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=0, repeat=1, stop=None, cache=None,
             step=None):
    """Yields one (B,) tensor of ids a step, max_new_tokens times, or until every row has stopped.
    idx: prompts, (B, T) or a list of 1-D tensors; each is prefilled once and sampled `repeat` times, neighbours of each
    other. Sample j of a prompt draws by (seed, j) whatever else is in the batch, so a row is what it would be alone.
    stop(row, id) -> True ends a row; from then on it yields -1 and holds no cache.
    cache: of as many rows as prompts, emptied first, widened by `repeat`; contiguous by default. step: model, compiled.
    A row that outgrows the cache's max_len goes on from the newest half of what it held; all rows are then prefilled
    again together. Raises ValueError for impossible arguments and FloatingPointError for logits that are not finite."""
    cfg, device, step = model.cfg, model.embed.weight.device, model if step is None else step
    rows = [row.tolist() for row in idx]
    for wrong, sentence in (
            (not cfg.causal, 'causal=false: an encoder does not generate'),
            (not rows or not all(rows), 'a prompt is empty: give it at least one token'),
            (not all(0 <= i < cfg.vocab_size for row in rows for i in row), f'ids must lie in [0, {cfg.vocab_size})'),
            (not 0 <= temperature < math.inf, f'temperature is {temperature}, but must be 0 or more'),
            (top_k < 0, f'top_k is {top_k}, but must be 0 (off) or more'),
            (not 0 <= top_p <= 1, f'top_p is {top_p}, but must be in [0, 1]'),
            (repeat < 1 or max_new_tokens < 0, f'repeat {repeat} or max_new_tokens {max_new_tokens} is too small')):
        if wrong:
            raise ValueError(sentence)
    if cache is None:
        cache = KVCache(cfg, len(rows), min(cfg.block_size, max(map(len, rows)) + max_new_tokens), device,
                        model.embed.weight.dtype)
    cache.truncate(0)
    noise = torch.stack([torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(2 ** 20 * seed + j))
                         for j in range(repeat)]).repeat(len(rows), 1).to(device)      # (B, max_new_tokens)
    logits = prefill(model, [row[-cache.max_len:] for row in rows], cache)  # (prompts, V)
    if repeat > 1:
        cache.repeat(repeat)
        logits = logits.repeat_interleave(repeat, dim=0)                 # (B, V)
    rows = [row[-cache.max_len:] for row in rows for _ in range(repeat)]    # ids so far, the newest not yet cached
    alive = [True] * len(rows)
    for n in range(max_new_tokens):
        token = pick(logits, noise[:, n], temperature, top_k, top_p)     # (B,)
        ids = token.tolist()
        if any(i < 0 for i, on in zip(ids, alive) if on):
            raise FloatingPointError('the model\'s logits are not finite: its weights are damaged, or fp16 overflows')
        yield token.where(torch.tensor(alive, device=device), -1)
        for r, i in enumerate(ids):
            if alive[r]:
                rows[r].append(i)
                alive[r] = stop is None or not stop(r, i)
        if not any(alive) or n + 1 == max_new_tokens:
            return
        rows = [row if on else [] for row, on in zip(rows, alive)]       # a stopped row stays in the batch, empty
        if max(map(len, rows)) > cache.max_len:
            rows = [row[-max(1, cache.max_len // 2):] if len(row) > cache.max_len else row for row in rows]
            cache.truncate(0)
            logits = prefill(model, rows, cache)
            continue
        if not all(alive):
            cache.truncate(torch.tensor([max(0, len(row) - 1) for row in rows]))  # the newest tokens aren't cached yet
        logits = step(token.clamp(min=0)[:, None], cache=cache)[0][:, -1]  # (B, V)

# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def matmul_params(cfg):
    """The N of "2N FLOPs a token": weights that a token is multiplied with. The head is among them; embeddings, which
    are looked up, are not; of the experts those that a token visits."""
    C, H, D, mats = cfg.n_embd, cfg.n_head, cfg.head_dim, 3 if cfg.mlp == 'swiglu' else 2
    attn = C * (H + 2 * cfg.n_kv_head) * D + H * D * C
    if cfg.kv_rank:
        attn = (C * cfg.q_rank + cfg.q_rank * H * D if cfg.q_rank else C * H * D) + C * (cfg.kv_rank + cfg.rope_dim) \
            + cfg.kv_rank * H * (D - cfg.rope_dim + cfg.v_dim) + H * cfg.v_dim * C
    n_moe = max(0, cfg.n_layer - cfg.n_dense) if cfg.n_expert else 0
    experts = C * cfg.n_expert + mats * C * cfg.d_expert * (cfg.n_active + cfg.n_shared)
    return cfg.n_layer * attn + (cfg.n_layer - n_moe) * mats * C * cfg.d_ff + n_moe * experts + C * cfg.vocab_rows


def flops_per_token(cfg, T):
    """Forward FLOPs a token in a sequence of T: 2N for the matrices, 2 L T H (D_qk + D_v) for scores and values, which
    is 4 L T C when H D = C. All T x T scores count (PaLM, arXiv:2204.02311, appendix B); a causal kernel makes half.
    Training is 3 times this: the backward pass makes two gradients of each product."""
    return 2 * matmul_params(cfg) + 2 * cfg.n_layer * T * cfg.n_head * (cfg.head_dim + cfg.v_dim)


def cache_bytes_per_token(cfg, bytes_per_value=2):
    """Bytes that a token adds to the cache: 2 L K D values, for latent attention L (kv_rank + rope_dim)."""
    return cfg.n_layer * bytes_per_value * sum(heads * width for heads, width in cache_shape(cfg))


def conflicts(c):
    """(is it wrong?, what to say) of each rule on several fields of a Config."""
    latent = c.kv_rank > 0
    rotated = c.rope_dim if latent else c.head_dim
    return ((c.n_head % c.n_kv_head, f'n_head {c.n_head} is no multiple of n_kv_head {c.n_kv_head}'),
            (c.pos == 'rope' and rotated % 2, f'rope turns pairs, but {rotated} rotated dimensions are odd'),
            (c.dropout >= 1, f'dropout is {c.dropout}, but must be below 1'),
            (c.rope_base <= 1, f'rope_base is {c.rope_base}, but must be above 1'),
            (c.window and not c.causal, f'window {c.window} needs causal=true'),
            (c.rope_scaling and c.pos != 'rope', f'rope_scaling {c.rope_scaling} needs pos=rope'),
            (0 < c.n_expert < c.n_active, f'n_active {c.n_active} is more than n_expert {c.n_expert}'),
            (c.n_expert and (c.mlp != 'swiglu' or c.bias), 'experts need mlp=swiglu and bias=false'),
            (not c.n_expert and (c.n_shared or c.n_dense), 'n_shared and n_dense belong to experts: set n_expert too'),
            (latent and not (0 < c.rope_dim < c.head_dim and c.v_dim <= c.head_dim),
             f'rope_dim {c.rope_dim} and v_dim {c.v_dim} must fit into head_dim {c.head_dim}'),
            (latent and (c.pos != 'rope' or c.n_kv_head != c.n_head or c.bias or c.qkv_bias or c.qk_norm),
             'latent attention needs pos=rope, n_kv_head=0, no biases, no qk_norm'),
            (not latent and (c.rope_dim or c.q_rank or c.v_dim != c.head_dim),
             'rope_dim, q_rank and v_dim belong to latent attention: set kv_rank too'))
