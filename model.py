"""A Transformer, embedding to head, to be read from top to bottom.

    Config        every size and every switch; FAMILIES says how GPT-2, Llama, Mistral, ... set them
    the path      norm, rotary positions, attention, MLP, block, Transformer, loss
                  -- a first sitting ends here --
    the parts     first weights, the loss in chunks, longer texts, mixture of experts, latent attention
    inference     the KV cache, picking a token, generate
    arithmetic    FLOPs and cache bytes per token; then the checks of a Config

Shape comments use these letters:
    B rows          T tokens in this call    S tokens visible: cached and new    V vocabulary
    C n_embd        H query heads            K key/value heads                   D head_dim
    F MLP width     M rows x tokens, as one list
    and in the later parts
    L layers        E experts                A experts that a token visits
    P, R            the plain and the rotated part of D in latent attention
    N parameters that a token is multiplied with
F in a comment is the MLP width; F in code is torch.nn.functional.
"""
import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """Sizes and switches; the defaults are the Llama block. 0 means derived, or off, as each
    comment says. Impossible values raise ValueError, see check_config."""

    # sizes, and the switches of the block
    vocab_size: int = 256        # token ids that exist
    block_size: int = 1024       # longest sequence, in tokens
    n_layer: int = 6             # blocks
    n_head: int = 6              # query heads
    n_kv_head: int = 0           # key/value heads, which query heads share; 0: n_head, nothing shared
    n_embd: int = 384            # width of the residual stream
    head_dim: int = 0            # width of a head; 0: n_embd / n_head
    d_ff: int = 0                # width of the MLP; 0: 4 n_embd, or 8/3 n_embd for swiglu
    norm: str = 'rms'            # rms (RMSNorm) or layer (LayerNorm)
    mlp: str = 'swiglu'          # swiglu, gelu (exact) or gelu_tanh (GPT-2's approximation)
    pos: str = 'rope'            # rope (rotary) or learned (one vector per position)
    wiring: str = 'pre'          # where the norms stand: pre, post or parallel, see Block.forward
    bias: bool = False           # biases in linear layers and LayerNorm, but not in head and router
    tie: bool = False            # the head shares the embedding's matrix
    dropout: float = 0.0         # on the embedding, and on what each part adds to the residual stream
    causal: bool = True          # false: an encoder, whose tokens see all tokens; it can't generate

    # rarer switches
    vocab_multiple: int = 1      # rows of embedding and head, rounded up to a multiple of this; a GPU likes 64
    norm_eps: float = 1e-5       # added to the mean square (or variance) before the square root
    qkv_bias: bool = False       # biases in the query, key and value projections only
    qk_norm: bool = False        # RMSNorm on each head's queries and keys, before they are rotated
    rope_base: float = 10000.0   # the larger, the slower the rotations; long texts need slow ones
    rope_scaling: str = ''       # for longer texts than trained on: linear,2 or another of ROPE_SCALINGS
    window: int = 0              # a token sees the last `window` tokens, itself included; 0: no limit

    # mixture of experts (skip on a first reading)
    n_expert: int = 0            # experts in place of the MLP; 0: one plain MLP
    n_active: int = 2            # experts that a token visits
    n_shared: int = 0            # further experts that every token visits
    d_expert: int = 0            # width of an expert; 0: d_ff
    n_dense: int = 0             # the first layers that keep the plain MLP
    norm_topk: bool = True       # the weights of the visited experts are scaled to sum to 1
    expert_scale: float = 1.0    # factor on those weights
    balance: float = 0.01        # weight of the load-balance term, in training only

    # latent attention (skip on a first reading)
    kv_rank: int = 0             # width of the latent that keys and values are made from; 0: off
    q_rank: int = 0              # width of the latent that queries are made from; 0: none, straight from x
    rope_dim: int = 0            # rotated part of head_dim; its key is shared by all heads
    v_dim: int = 0               # width of a value head; 0: head_dim

    def __post_init__(self):
        # the values before derivation: copy(n_embd=...) starts from these, and derives the rest anew
        self.given = {field.name: getattr(self, field.name) for field in fields(self)}
        check_config(self)
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.d_ff == 0:
            self.d_ff = 4 * self.n_embd
            # swiglu has three matrices, not two: 2/3 of 4 n_embd costs the same; a multiple of 128
            if self.mlp == 'swiglu':
                self.d_ff = math.ceil(8 / 3 * self.n_embd / 128) * 128
        self.d_expert = self.d_expert or self.d_ff
        self.v_dim = self.v_dim or self.head_dim

    def copy(self, **changes):
        """The same Config with some values changed; what was derived is derived again."""
        return Config(**{**self.given, **changes})

    @property
    def vocab_rows(self):
        """Rows of embedding and head: vocab_size, rounded up to a multiple of vocab_multiple."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


# What each family switches (skip on a first reading); windows, ranks and experts fit small models.
FAMILIES = {
    'gpt1': dict(norm='layer', bias=True, pos='learned', mlp='gelu_tanh', tie=True, wiring='post'),
    # GPT-3 too, except its sparse layers
    'gpt2': dict(norm='layer', bias=True, pos='learned', mlp='gelu_tanh', tie=True),
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
    # the block of ViT and of Whisper's encoder
    'encoder': dict(norm='layer', bias=True, pos='learned', mlp='gelu', causal=False),
}

# -------------------------------------------------------------------------------
# The path every token takes


def make_norm(cfg, width):
    """RMSNorm or LayerNorm over the last dimension. Both compute in fp32; the result has the
    input's dtype, or fp32 under CUDA's autocast."""
    if cfg.norm == 'rms':
        return nn.RMSNorm(width, eps=cfg.norm_eps)
    return nn.LayerNorm(width, eps=cfg.norm_eps, bias=cfg.bias)


class InnerNorm(nn.RMSNorm):
    """RMSNorm behind a linear layer. Under autocast x is bf16 there and the weight fp32; that
    mixture would miss the fast kernel, so x is cast first."""

    def forward(self, x):
        return super().forward(x.type_as(self.weight))


class Rope:
    """Rotary positions (arXiv:2104.09864). Dimensions i and i + D/2 of a head form a pair. At
    position p, pair i is rotated by the angle p * frequency[i], so positions enter the product
    of a query and a key only through their distance.

    The tables stay in fp32. In bf16 neighbouring positions would round to the same angle: the
    slowest pair would have only 636 different angles for 2048 positions. They aren't buffers,
    because model.bfloat16() would cast buffers, and DDP would broadcast them in every forward
    pass.
    """

    def __init__(self, cfg):
        # on the CPU, so that a model made on meta has them too
        frequency, factor = rope_frequencies(cfg)  # (D/2,)
        position = torch.arange(cfg.block_size, dtype=torch.float32, device='cpu')
        angle = torch.outer(position, frequency)   # (block_size, D/2)
        self.tables = angle.cos() * factor, angle.sin() * factor
        # what rotate() reads: the tables, or a copy that move_to made
        self.cos, self.sin = self.tables

    def move_to(self, device):
        """Copies the tables to the device, unless they are there already."""
        if self.cos.device != device:
            cos, sin = self.tables
            self.cos, self.sin = cos.to(device), sin.to(device)

    def rotate(self, x, pos):
        """x (B, T, heads, D) -> rotated, in fp32. pos: the tokens' positions, (1, T), or (B, T)
        if each row has its own."""
        cos = self.cos[pos][:, :, None]    # (1 or B, T, 1, D/2)
        sin = self.sin[pos][:, :, None]    # (1 or B, T, 1, D/2)
        a, b = x.float().chunk(2, dim=-1)  # (B, T, heads, D/2) twice
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_frequencies(cfg):
    """The angle per position of each pair, in radians, (D/2,); and a factor on cos and sin, 1.0
    except for YaRN."""
    # latent attention rotates only a part of each head
    width = cfg.rope_dim or cfg.head_dim
    # from 1 for the first pair down to nearly 1 / rope_base for the last
    even = torch.arange(0, width, 2, dtype=torch.float32, device='cpu')
    frequency = cfg.rope_base ** (-even / width)  # (D/2,)
    if cfg.rope_scaling:
        return scale_frequencies(cfg, frequency)
    return frequency, 1.0


class Fused(nn.Linear):
    """Several matrices with one input, stacked: one large product is faster than several small
    ones. roles: their output widths. Returns one tensor per role."""

    def __init__(self, width, roles, bias=False):
        super().__init__(width, sum(roles), bias)
        self.roles = roles

    def forward(self, x):
        return super().forward(x).split(self.roles, dim=-1)


class ToResidual(nn.Linear):
    """A linear layer whose output is added to the residual stream: init_weights makes its
    weights smaller than others."""


def attention_mask(cfg, pos, S):
    """Which of S key/value slots each new token may see, (1 or B, 1, T, S). Slot j holds
    position j.

        three new tokens at positions 2, 3, 4; S = 5       the same, window = 2
            2   x x x . .                                      . x x . .
            3   x x x x .                                      . . x x .
            4   x x x x x                                      . . . x x

    pos: the positions of the new tokens, (1, T), or (B, T) if each row has its own.

    None where SDPA needs no mask: in an encoder, which sees everything; and if nothing is cached
    and the window hides nothing, since is_causal then does the same, and faster. With cached
    tokens is_causal would be wrong: it takes the first new token for position 0.
    """
    nothing_cached = S == pos.shape[1]
    window_hides = 0 < cfg.window < S
    if not cfg.causal or (nothing_cached and not window_hides):
        return None
    query = pos[:, None, :, None]             # (1 or B, 1, T, 1)
    key = torch.arange(S, device=pos.device)  # (S,)
    mask = key <= query                       # (1 or B, 1, T, S)
    if cfg.window:
        mask = mask & (key > query - cfg.window)
    # ALiBi, or a mask between documents, goes here, in place of the early return: SDPA adds a mask
    # of floats to the scores
    return mask


def attend(q, k, v, mask, causal, scale=None):
    """softmax(scale * q k^T + mask) v, the one attention of this file.

    q (B, H, T, D), k and v (B, K, S, D)  ->  (B, H, T, D)
    The scores (B, H, T, S) are never stored; bench.py's explicit_attention writes them out.

    H / K query heads share each key/value head. scale None is 1/sqrt(D). A mask is avoided where
    possible, since CUDA's flash kernel takes none.
    """
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.layer, self.rope, self.causal = layer, rope, cfg.causal
        self.n_head, self.n_kv_head, self.head_dim = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        q_width = cfg.n_head * cfg.head_dim
        kv_width = cfg.n_kv_head * cfg.head_dim
        self.w_qkv = Fused(cfg.n_embd, [q_width, kv_width, kv_width], cfg.bias or cfg.qkv_bias)
        self.w_out = ToResidual(q_width, cfg.n_embd, cfg.bias)
        # one norm for the queries of all heads, one for the keys
        self.q_norm = InnerNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = InnerNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x, pos, mask, cache):
        q, k, v = self.w_qkv(x)                               # (B, T, H D), (B, T, K D) twice
        q = q.unflatten(-1, (self.n_head, self.head_dim))     # (B, T, H, D)
        k = k.unflatten(-1, (self.n_kv_head, self.head_dim))  # (B, T, K, D)
        v = v.unflatten(-1, (self.n_kv_head, self.head_dim))  # (B, T, K, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q = self.rope.rotate(q, pos)
            k = self.rope.rotate(k, pos)
        # rotations and norms give fp32; SDPA wants one dtype, and heads before tokens
        q = q.type_as(v).transpose(1, 2)                      # (B, H, T, D)
        k = k.type_as(v).transpose(1, 2)                      # (B, K, T, D)
        v = v.transpose(1, 2)                                 # (B, K, T, D)
        # what was cached comes before the new tokens
        if cache is not None:
            k, v = cache.update(self.layer, k, v)             # (B, K, S, D) twice
        y = attend(q, k, v, mask, self.causal)                # (B, H, T, D)
        # the heads side by side again
        y = y.transpose(1, 2).flatten(2)                      # (B, T, H D)
        return self.w_out(y)                                  # (B, T, C)


class SwiGLU(nn.Module):
    """The gated MLP (arXiv:2002.05202): w_down(silu(w_gate x) * (w_up x))."""

    def __init__(self, cfg, width):
        super().__init__()
        # w_gate and w_up, stacked
        self.w_up = Fused(cfg.n_embd, [width, width], cfg.bias)
        self.w_down = ToResidual(width, cfg.n_embd, cfg.bias)

    def forward(self, x):
        gate, up = self.w_up(x)                # (B, T, F) twice
        return self.w_down(F.silu(gate) * up)  # (B, T, C)


class MLP(nn.Module):
    """The classic MLP: w_down(gelu(w_up x))."""

    def __init__(self, cfg, width):
        super().__init__()
        self.approximate = 'tanh' if cfg.mlp == 'gelu_tanh' else 'none'
        self.w_up = nn.Linear(cfg.n_embd, width, cfg.bias)
        self.w_down = ToResidual(width, cfg.n_embd, cfg.bias)

    def forward(self, x):
        up = self.w_up(x)  # (B, T, F)
        return self.w_down(F.gelu(up, approximate=self.approximate))  # (B, T, C)


def make_mlp(cfg, layer):
    """The part of a block that works on each token alone. The first n_dense layers have no
    experts."""
    if cfg.n_expert and layer >= cfg.n_dense:
        return MixtureOfExperts(cfg)
    if cfg.mlp == 'swiglu':
        return SwiGLU(cfg, cfg.d_ff)
    return MLP(cfg, cfg.d_ff)


class Block(nn.Module):
    """Attention lets the tokens look at each other, then the MLP works on each token alone. Each
    of them adds its output to the residual stream x."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.wiring = cfg.wiring
        self.attn_norm = make_norm(cfg, cfg.n_embd)
        self.attn = LatentAttention(cfg, layer, rope) if cfg.kv_rank else Attention(cfg, layer, rope)
        self.mlp_norm = None if cfg.wiring == 'parallel' else make_norm(cfg, cfg.n_embd)
        self.mlp = make_mlp(cfg, layer)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, pos, mask, cache):
        """x (B, T, C) -> x (B, T, C), and the load-balance term of experts, one per row (B,);
        0.0 without experts."""
        if self.wiring == 'pre':
            # norm before each part: GPT-2, Llama and nearly all since
            x = x + self.drop(self.attn(self.attn_norm(x), pos, mask, cache))
            y, balance = self.run_mlp(self.mlp_norm(x))
            return x + self.drop(y), balance
        if self.wiring == 'post':
            # norm after each addition: the Transformer of 2017, GPT-1
            x = self.attn_norm(x + self.drop(self.attn(x, pos, mask, cache)))
            y, balance = self.run_mlp(x)
            return self.mlp_norm(x + self.drop(y)), balance
        # parallel, as in PaLM: one norm, which both parts read
        n = self.attn_norm(x)
        y, balance = self.run_mlp(n)
        return x + self.drop(self.attn(n, pos, mask, cache) + y), balance

    def run_mlp(self, x):
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x)
        return self.mlp(x), 0.0


def take_positions(x, cache):
    """x: ids (B, T), or embeddings (B, T, C). Returns the positions of these new tokens, and S,
    how many tokens are then visible."""
    T = x.shape[1]
    if cache is None:
        return torch.arange(T, device=x.device)[None], T  # (1, T), the same in all rows
    # reserves T slots in each row
    pos = cache.extend(T)                                 # (B, T), each row has its own
    return pos, cache.visible


class Transformer(nn.Module):
    """`model(idx, targets)` is training, `model(idx, cache=cache)` is inference."""

    # a loss with more logits than this, 256 MiB in fp32, is computed in chunks of tokens
    logits_at_once = 2 ** 26

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.rope = Rope(cfg) if cfg.pos == 'rope' else None
        self.embed = nn.Embedding(cfg.vocab_rows, cfg.n_embd)
        self.embed_pos = nn.Embedding(cfg.block_size, cfg.n_embd) if cfg.pos == 'learned' else None
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer, self.rope) for layer in range(cfg.n_layer))
        # a post-norm block ends with a norm of its own
        self.norm = nn.Identity() if cfg.wiring == 'post' else make_norm(cfg, cfg.n_embd)
        self.lm_head = None if cfg.tie else nn.Linear(cfg.n_embd, cfg.vocab_rows, bias=False)
        init_weights(self)

    def forward(self, idx, targets=None, cache=None, all_logits=False):
        """Ids (B, T) -> logits (B, 1, V) of the last position, or (B, T, V) of all. With targets
        (B, T) -> the mean loss in nats, a scalar. A target of -1 is ignored."""
        x, balance = self.run_blocks(idx, cache)  # (B, T, C), (B,) or 0.0
        if targets is None:
            return self.head(x if all_logits else x[:, -1:])
        refuse_if(not self.cfg.causal, 'causal=false: each token sees its target, so no loss')
        loss = self.loss(x, targets)
        # experts: the value is 0, so the loss stays cross-entropy; the gradient is the balance term's
        if self.cfg.n_expert:
            loss = loss + self.cfg.balance * balance_gradient(balance, targets)
        return loss

    def hidden(self, x, cache=None):
        """Ids (B, T), or embeddings (B, T, C) -> the last block's normed output (B, T, C)."""
        return self.run_blocks(x, cache)[0]

    def run_blocks(self, x, cache=None):
        """The last block's normed output (B, T, C), and the sum of the blocks' balance terms."""
        check_room(self.cfg, x, cache)
        pos, S = take_positions(x, cache)  # (1 or B, T)
        mask = attention_mask(self.cfg, pos, S)
        # ids are embedded; embeddings, of an image's patches, say, are taken as they are
        if not x.is_floating_point():
            x = self.embed(x)              # (B, T, C)
        if self.embed_pos is not None:
            x = x + self.embed_pos(pos)
        if self.rope is not None:
            self.rope.move_to(x.device)
        x = self.drop(x)
        balance = 0.0
        for block in self.blocks:
            x, of_block = block(x, pos, mask, cache)
            balance = balance + of_block
        return self.norm(x), balance

    def head(self, x):
        """(..., C) -> logits (..., V), without those of padding rows."""
        if self.lm_head is None:
            logits = F.linear(x, self.embed.weight)  # (..., vocab_rows)
        else:
            logits = self.lm_head(x)                 # (..., vocab_rows)
        return logits[..., :self.cfg.vocab_size]     # (..., V)

    def nll(self, x, targets):
        """x (M, C), targets (M,) -> the targets' negative log-likelihood, summed in fp32."""
        return F.cross_entropy(self.head(x).float(), targets, ignore_index=-1, reduction='sum')

    def loss(self, x, targets):
        """x (B, T, C), targets (B, T) -> the mean of nll; 0 if all targets are -1."""
        x, targets = x.flatten(0, 1), targets.flatten()  # (M, C), (M,)
        if len(x) * self.cfg.vocab_size <= self.logits_at_once:
            total = self.nll(x, targets)
        else:
            total = nll_in_chunks(self, x, targets)
        return total / (targets != -1).sum().clamp(min=1)


# -------------------------------------------------------------------------------
# The end of the first sitting. From here on each part stands for itself, in any order.

# -------------------------------------------------------------------------------
# First weights


@torch.no_grad()
def init_weights(model):
    """As in GPT-2: normal(0, 0.02), and biases zero. Each of the L blocks adds two outputs to
    the residual stream; to keep their sum from growing with depth, the matrices that make them
    are scaled by 1/sqrt(2 L). Norms, and bare parameters of modules of yours, stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
        if isinstance(module, MixtureOfExperts):
            module.w_up.normal_(0, 0.02)
            module.w_down.normal_(0, 0.02)
    for weight in residual_weights(model):
        weight.mul_(1 / math.sqrt(2 * model.cfg.n_layer))


def residual_weights(model):
    """Yields the weights whose products are added to the residual stream."""
    for module in model.modules():
        if isinstance(module, ToResidual):
            yield module.weight
        if isinstance(module, MixtureOfExperts):
            yield module.w_down


# -------------------------------------------------------------------------------
# The loss in chunks


class ChunkedNLL(torch.autograd.Function):
    """Sum of the model's nll over chunks of tokens, whose logits never exist all at once. The
    gradients of a chunk are made in the forward pass, right after its logits: nothing has to be
    computed again in the backward pass."""

    @staticmethod
    def forward(ctx, nll, chunk_size, x, targets, *weights):
        total = torch.zeros((), device=x.device)
        # x's gradients stand side by side, the weights' add up over the chunks, in fp32
        x_grads = []
        weight_grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for x_chunk, targets_chunk in zip(x.split(chunk_size), targets.split(chunk_size)):
            with torch.enable_grad():
                x_chunk = x_chunk.detach().requires_grad_()  # (n, C)
                loss = nll(x_chunk, targets_chunk)
            # this chunk's logits are freed with its graph
            x_grad, *grads = torch.autograd.grad(loss, (x_chunk, *weights), allow_unused=True)
            total += loss.detach()
            x_grads.append(x_grad)
            for weight_grad, grad in zip(weight_grads, grads):
                if grad is not None:
                    weight_grad += grad
        ctx.save_for_backward(torch.cat(x_grads), *weight_grads)
        ctx.dtypes = [weight.dtype for weight in weights]
        return total

    @staticmethod
    def backward(ctx, scale):
        """scale: the gradient of the total, which is 1 / number of targets, times fp16's scale."""
        x_grad, *weight_grads = ctx.saved_tensors
        weight_grads = [(grad * scale).to(dtype) for grad, dtype in zip(weight_grads, ctx.dtypes)]
        return None, None, x_grad * scale, None, *weight_grads


def nll_in_chunks(model, x, targets):
    """model.nll(x, targets) for x (M, C) and targets (M,), with logits_at_once logits at a
    time."""
    chunk_size = max(1, model.logits_at_once // model.cfg.vocab_size)
    if not torch.is_grad_enabled():
        chunks = zip(x.split(chunk_size), targets.split(chunk_size))
        return sum(model.nll(*chunk) for chunk in chunks)
    # a subclass's head() may use any parameter that is not in the blocks
    in_blocks = set(model.blocks.parameters())
    weights = [p for p in model.parameters() if p not in in_blocks and p.requires_grad]
    return ChunkedNLL.apply(model.nll, chunk_size, x, targets, *weights)


# -------------------------------------------------------------------------------
# Rotary positions for longer texts than a model was trained on

# the numbers that follow each kind's name in cfg.rope_scaling
ROPE_SCALINGS = {
    'linear': ('factor',),
    'llama3': ('factor', 'low', 'high', 'length'),
    'yarn': ('factor', 'length', 'fast', 'slow', 'm', 'm_all'),
}


def parse_rope_scaling(text):
    """'linear,2' -> ('linear', {'factor': 2.0}). Raises ValueError for what it can't read."""
    kind, *numbers = text.split(',')
    # an unknown kind has no names, so it fails as a wrong count of numbers does
    names = ROPE_SCALINGS.get(kind, ())
    try:
        number = dict(zip(names, map(float, numbers), strict=True))
        possible = number['factor'] >= 1 and all(0 <= n < math.inf for n in number.values())
        if kind == 'llama3':
            possible = possible and number['low'] < number['high']
        if kind == 'yarn':
            possible = possible and min(number['length'], number['fast'], number['slow']) > 0
    except (ValueError, KeyError):
        possible = False
    if not possible:
        known = ' or '.join(f'{kind},{",".join(names)}' for kind, names in ROPE_SCALINGS.items())
        raise ValueError(f'rope_scaling is {text!r}, but must be {known}, with possible numbers')
    return kind, number


def scale_frequencies(cfg, frequency):
    """The frequencies (D/2,) for texts `factor` times as long -> frequencies (D/2,), factor on
    cos and sin. Slow pairs are slowed down by `factor`, so that they meet no angle that they
    weren't trained on."""
    kind, number = parse_rope_scaling(cfg.rope_scaling)
    slowed = frequency / number['factor']                         # (D/2,)
    if kind == 'linear':
        # all pairs alike (arXiv:2306.15595)
        return slowed, 1.0
    if kind == 'llama3':
        # fast pairs are kept, slow ones slowed, with a ramp between (Llama 3.1's reference code)
        turns = number['length'] * frequency / (2 * math.pi)      # (D/2,)
        keep = (turns - number['low']) / (number['high'] - number['low'])
        keep = keep.clamp(0, 1)
        return frequency * keep + slowed * (1 - keep), 1.0
    # YaRN (arXiv:2309.00071): the same, but the ramp is linear in the pair's number, not its turns
    width = 2 * len(frequency)

    def pair_with(turns):
        """Which pair makes so many turns within the trained length: its number, not rounded."""
        trained = number['length'] / (2 * math.pi * turns)
        return width * math.log(trained) / (2 * math.log(cfg.rope_base))
    first = max(math.floor(pair_with(number['fast'])), 0)
    last = min(math.ceil(pair_with(number['slow'])), width - 1)
    pair = torch.arange(len(frequency), device=frequency.device)  # (D/2,)
    ramp = (pair - first) / max(last - first, 0.001)
    ramp = ramp.clamp(0, 1)
    # longer texts need sharper attention
    factor = number['factor']
    sharpen = yarn_mscale(factor, number['m']) / yarn_mscale(factor, number['m_all'])
    return frequency * (1 - ramp) + slowed * ramp, sharpen


def yarn_mscale(factor, m):
    """How much YaRN sharpens attention over `factor` times the trained length (arXiv:2309.00071,
    eq. 22)."""
    return 0.1 * m * math.log(factor) + 1


# -------------------------------------------------------------------------------
# Mixture of experts, in place of the MLP


class Router(nn.Linear):
    """Scores each expert for each token. In fp32 also under autocast: in bf16 1.8 % of the
    tokens of a DeepSeek model would visit other experts."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())  # (B, T, E)


class MixtureOfExperts(nn.Module):
    """E experts, each a SwiGLU. A router picks A of them for each token and adds up their
    outputs, weighted. Shared experts work on every token (Mixtral, arXiv:2401.04088;
    DeepSeekMoE, arXiv:2401.06066). No token is ever dropped."""

    def __init__(self, cfg):
        super().__init__()
        self.n_active, self.norm_topk, self.scale = cfg.n_active, cfg.norm_topk, cfg.expert_scale
        # the rows of an expert's w_up are gate and up
        self.roles = [cfg.d_expert, cfg.d_expert]
        w_up = torch.empty(cfg.n_expert, 2 * cfg.d_expert, cfg.n_embd)  # (E, 2 F, C)
        w_down = torch.empty(cfg.n_expert, cfg.n_embd, cfg.d_expert)  # (E, C, F)
        self.w_up, self.w_down = nn.Parameter(w_up), nn.Parameter(w_down)
        self.router = Router(cfg.n_embd, cfg.n_expert, bias=False)
        self.shared = SwiGLU(cfg, cfg.n_shared * cfg.d_expert) if cfg.n_shared else None

    def forward(self, x):
        """x (B, T, C) -> (B, T, C), and the balance term (B,), which is 0.0 outside training."""
        probs = self.router(x).softmax(-1)          # (B, T, E)
        weight, chosen = probs.topk(self.n_active)  # (B, T, A) twice
        balance = balance_term(probs, chosen) if self.training else 0.0
        # the weights of the chosen experts
        if self.norm_topk:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight * self.scale
        y = self.visit(x.flatten(0, 1), chosen.flatten(0, 1), weight.flatten(0, 1))  # (M, C)
        y = y.view_as(x)                            # (B, T, C)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, balance

    # not compiled: how many tokens each expert gets is known only at run time
    @torch.compiler.disable
    def visit(self, x, chosen, weight):
        """x (M, C), chosen experts (M, A), weight (M, A) -> weighted sum of the experts' outputs
        (M, C)."""
        # Visit i of the M A belongs to token i // A. Sorted by expert, each expert's visits are one
        # slice, and so one product.
        experts, order = chosen.flatten().sort(stable=True)      # (M A,) twice
        token = order // self.n_active                           # (M A,)
        weight = weight.flatten()[order]                         # (M A,)
        # the experts that are visited, and how often: one wait for the device
        visited = torch.stack(experts.unique_consecutive(return_counts=True)).tolist()
        # unbind, since the gradient of each w_up[expert] would be as large as w_up
        w_up, w_down = self.w_up.unbind(), self.w_down.unbind()  # (2 F, C), (C, F) E times
        y = torch.zeros_like(x)                                  # (M, C)
        start = 0
        for expert, n in zip(*visited):
            rows = token[start:start + n]                        # (n,)
            up = F.linear(x[rows], w_up[expert])                 # (n, 2 F)
            gate, up = up.split(self.roles, dim=-1)              # (n, F) twice
            out = F.linear(F.silu(gate) * up, w_down[expert])    # (n, C)
            out = out * weight[start:start + n, None]
            y.index_add_(0, rows, out.type_as(y))
            start += n
        return y


def balance_term(probs, chosen):
    """The load-balance term of Switch Transformer (arXiv:2101.03961, eq. 4), one per row: 1 if
    all experts are used alike, more if not. probs (B, T, E), chosen (B, T, A) -> (B,)."""
    n_expert = probs.shape[-1]
    visits = F.one_hot(chosen, n_expert).float()             # (B, T, A, E)
    share_of_visits = visits.mean((1, 2))                    # (B, E)
    mean_prob = probs.mean(1)                                # (B, E)
    return n_expert * (share_of_visits * mean_prob).sum(-1)  # (B,)


def balance_gradient(balance, targets):
    """balance (B,), targets (B, T) -> 0, with the gradient of the mean balance term. Added to
    the loss, it changes what the model learns and leaves the loss what it is: cross-entropy."""
    # each row counts as much as it has targets
    weight = (targets != -1).sum(1)  # (B,)
    mean = (balance * weight).sum() / weight.sum().clamp(min=1)
    return mean - mean.detach()


# -------------------------------------------------------------------------------
# Latent attention, in place of attention


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Per token the cache holds one
    latent, kv_rank numbers from which all heads make keys and values, and one rotated key that
    all heads share. Two forms give the same result: `expanded` (training, prefill) makes the
    keys and values; `absorbed` (after cached tokens) lets attention read the latents themselves,
    as MQA with one wide head: w_k is applied to the queries, w_v to the outputs."""

    def __init__(self, cfg, layer, rope):
        super().__init__()
        self.layer, self.rope, self.causal = layer, rope, cfg.causal
        self.n_head, self.kv_rank, self.v_dim = cfg.n_head, cfg.kv_rank, cfg.v_dim
        # P and R, the parts of D
        self.q_split = cfg.head_dim - cfg.rope_dim, cfg.rope_dim
        self.scale = latent_scale(cfg)
        # queries, straight from x or from a latent of their own
        self.w_q_latent = nn.Linear(cfg.n_embd, cfg.q_rank, bias=False) if cfg.q_rank else nn.Identity()
        self.q_norm = InnerNorm(cfg.q_rank, cfg.norm_eps) if cfg.q_rank else nn.Identity()
        self.w_q = nn.Linear(cfg.q_rank or cfg.n_embd, cfg.n_head * cfg.head_dim, bias=False)
        # the latent and the shared key, then keys and values from the latent
        self.w_kv_latent = Fused(cfg.n_embd, [cfg.kv_rank, cfg.rope_dim])
        self.kv_norm = InnerNorm(cfg.kv_rank, cfg.norm_eps)
        self.w_kv = Fused(cfg.kv_rank, [cfg.n_head * self.q_split[0], cfg.n_head * cfg.v_dim])
        self.w_out = ToResidual(cfg.n_head * cfg.v_dim, cfg.n_embd, bias=False)

    def forward(self, x, pos, mask, cache):
        q, q_rope = self.queries(x, pos)                    # (B, H, T, P), (B, H, T, R)
        latent, k_rope = self.w_kv_latent(x)                # (B, T, kv_rank), (B, T, R)
        latent = self.kv_norm(latent)
        k_rope = self.rope.rotate(k_rope[:, :, None], pos)  # (B, T, 1, R)
        latent = latent.type_as(q)[:, None]                 # (B, 1, T, kv_rank)
        k_rope = k_rope.type_as(q).transpose(1, 2)          # (B, 1, T, R)
        if cache is not None:
            latent, k_rope = cache.update(self.layer, latent, k_rope)  # (B, 1, S, kv_rank), (B, 1, S, R)
        # S > T: something was cached
        form = self.absorbed if latent.shape[2] > x.shape[1] else self.expanded
        y = form(q, q_rope, latent, k_rope, mask)           # (B, H, T, v_dim)
        y = y.transpose(1, 2).flatten(2)                    # (B, T, H v_dim)
        return self.w_out(y)                                # (B, T, C)

    def queries(self, x, pos):
        """x (B, T, C) -> the plain part (B, H, T, P) and the rotated part (B, H, T, R) of each
        head's query."""
        x = self.q_norm(self.w_q_latent(x))               # (B, T, C or q_rank)
        q = self.w_q(x).unflatten(-1, (self.n_head, -1))  # (B, T, H, D)
        q, q_rope = q.split(self.q_split, dim=-1)         # (B, T, H, P), (B, T, H, R)
        q_rope = self.rope.rotate(q_rope, pos).type_as(q)
        return q.transpose(1, 2), q_rope.transpose(1, 2)

    def expanded(self, q, q_rope, latent, k_rope, mask):
        k, v = self.w_kv(latent[:, 0])                          # (B, S, H P), (B, S, H v_dim)
        k = k.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, S, P)
        v = v.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, S, v_dim)
        k_rope = k_rope.expand(-1, self.n_head, -1, -1)         # (B, H, S, R)
        q = torch.cat((q, q_rope), dim=-1)                      # (B, H, T, D)
        k = torch.cat((k, k_rope), dim=-1)                      # (B, H, S, D)
        # the flash kernel wants values as wide as keys
        v = F.pad(v, (0, k.shape[-1] - self.v_dim))             # (B, H, S, D)
        y = attend(q, k, v, mask, self.causal, self.scale)      # (B, H, T, D)
        return y[..., :self.v_dim]                              # (B, H, T, v_dim)

    def absorbed(self, q, q_rope, latent, k_rope, mask):
        w_k, w_v = self.w_kv.weight.split(self.w_kv.roles)  # (H P, kv_rank), (H v_dim, kv_rank)
        w_k = w_k.unflatten(0, (self.n_head, -1))           # (H, P, kv_rank)
        w_v = w_v.unflatten(0, (self.n_head, -1))           # (H, v_dim, kv_rank)
        # q (w_k latent) = (q w_k) latent, so no key is ever made
        q = torch.cat((q @ w_k, q_rope), dim=-1)            # (B, H, T, kv_rank + R)
        k = torch.cat((latent, k_rope), dim=-1)             # (B, 1, S, kv_rank + R)
        # the keys are the values too; their last R columns are dropped again
        y = attend(q, k, k, mask, self.causal, self.scale)  # (B, H, T, kv_rank + R)
        y = y[..., :self.kv_rank]                           # (B, H, T, kv_rank)
        return y @ w_v.mT                                   # (B, H, T, v_dim)


def latent_scale(cfg):
    """The scale of latent attention's scores: 1/sqrt(D), and YaRN's sharpening of query and of
    key."""
    scale = 1 / math.sqrt(cfg.head_dim)
    if cfg.rope_scaling.startswith('yarn'):
        _, number = parse_rope_scaling(cfg.rope_scaling)
        scale = scale * yarn_mscale(number['factor'], number['m_all']) ** 2
    return scale


# -------------------------------------------------------------------------------
# Inference


def cache_shape(cfg):
    """What a token leaves in each layer, as (heads, width) twice: of its key and its value, or
    of its latent and its rotated key."""
    if cfg.kv_rank:
        return (1, cfg.kv_rank), (1, cfg.rope_dim)
    return (cfg.n_kv_head, cfg.head_dim), (cfg.n_kv_head, cfg.head_dim)


class KVCache:
    """Keys and values of `batch` rows of up to max_len tokens each, allocated at once. Four
    verbs: extend, update, truncate, repeat. Slot j of a row holds position j.

    `static` is for a compiled step: once there is something in the cache, attention reads all
    max_len slots and the mask hides the empty ones, so that no shape changes from token to
    token. The caller sees to it that no row grows past max_len.
    """

    def __init__(self, cfg, batch, max_len, device=None, dtype=None, static=False):
        check_cache(cfg, max_len)
        self.max_len, self.static = max_len, static
        key_shape, value_shape = cache_shape(cfg)

        def one_per_layer(heads, width):
            # zeros: a hidden slot has weight 0, but 0 * NaN would be NaN
            shape = batch, heads, max_len, width
            return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
        self.k = one_per_layer(*key_shape)    # L times (B, K, max_len, D)
        self.v = one_per_layer(*value_shape)  # L times (B, K, max_len, D)
        # tokens in each row, and the slots that attention reads: S
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # (B,)
        self.visible = 0

    def extend(self, T):
        """Makes room for T more tokens in every row; returns their positions (B, T). Once per
        forward pass."""
        visible = self.visible + T
        if self.static and self.visible > 0:
            visible = self.max_len
        refuse_if(visible > self.max_len,
                  f'{visible} tokens are more than the {self.max_len} that this cache has room for')
        self.visible = visible
        new = torch.arange(T, device=self.lengths.device)  # (T,)
        self.pos = self.lengths[:, None] + new             # (B, T)
        self.lengths += T
        return self.pos

    def update(self, layer, k, v):
        """Stores one layer's new k and v (B, K, T, D); returns all that is visible, (B, K, S, D)
        twice."""
        # slot pos[b, t] of row b; two index tensors around a slice give (B, T, K, D)
        row = torch.arange(len(self.pos), device=self.pos.device)[:, None]  # (B, 1)
        all_k, all_v = self.k[layer], self.v[layer]      # (B, K, max_len, D) twice
        all_k[row, :, self.pos] = k.transpose(1, 2).to(all_k.dtype)  # (B, T, K, D)
        all_v[row, :, self.pos] = v.transpose(1, 2).to(all_v.dtype)  # (B, T, K, D)
        seen_k = all_k[:, :, :self.visible].to(k.dtype)  # (B, K, S, D)
        seen_v = all_v[:, :, :self.visible].to(v.dtype)  # (B, K, S, D)
        return seen_k, seen_v

    def truncate(self, length):
        """Forgets the tokens from position `length` on: an int, or one per row (B,)."""
        length = torch.as_tensor(length, device=self.lengths.device)
        self.lengths.copy_(self.lengths.minimum(length))
        self.visible = int(self.lengths.max())
        if self.static and self.visible > 0:
            self.visible = self.max_len

    def repeat(self, n):
        """Copies each row n times, side by side: a prompt is read once and continued n times."""
        if n == 1:
            return
        self.k = [k.repeat_interleave(n, dim=0) for k in self.k]
        self.v = [v.repeat_interleave(n, dim=0) for v in self.v]
        self.lengths = self.lengths.repeat_interleave(n)

    @property
    def nbytes(self):
        return sum(x.nbytes for x in self.k + self.v)


def pick(logits, noise, temperature=1.0, top_k=0, top_p=1.0):
    """One id per row, (B,), from logits (B, V) and one random number in [0, 1) per row, noise
    (B,).

    temperature 0 takes the likeliest id. top_k keeps exactly the k likeliest (0: all). top_p
    keeps an id if the likelier ones together have less than this probability (arXiv:1904.09751),
    so always the first. A row of logits that has no finite maximum gives -1.
    """
    # NaN wins a max, so a row with NaN has no finite best
    values = logits.float()                                        # (B, V)
    best, likeliest = values.max(-1, keepdim=True)                 # (B, 1) twice
    if temperature == 0:
        return likeliest.where(best.isfinite(), -1)[:, 0]          # (B,)
    # for top_k and top_p sorted by falling probability; values[b, i] belongs to ids[b, i]
    V = logits.shape[-1]
    ids = torch.arange(V, device=logits.device).expand_as(logits)  # (B, V)
    if 0 < top_k < V or top_p < 1:
        values, ids = values.topk(min(top_k or V, V))              # (B, k) twice
    # the largest is subtracted before the division: a tiny temperature must not overflow
    probs = ((values - best) / max(temperature, 1e-30)).softmax(-1)  # (B, k)
    if top_p < 1:
        # before == 0 is the first one, which stays even for top_p 0
        before = probs.cumsum(-1) - probs                          # (B, k)
        probs = probs.where((before < top_p) | (before == 0), 0)
    # the id at which the running sum passes the mark; one does, as the mark is below the total
    running = probs.cumsum(-1)                                     # (B, k)
    mark = noise[:, None] * (1 - 1e-6) * running[:, -1:]           # (B, 1)
    index = torch.searchsorted(running, mark, right=True)          # (B, 1)
    index = index.clamp(max=running.shape[-1] - 1)
    return ids.gather(1, index).where(best.isfinite(), -1)[:, 0]   # (B,)


def prefill(model, rows, cache):
    """Reads rows, lists of ids, into an empty cache as one batch; returns the logits after each
    row, (B, V). Shorter rows are padded on the right, where their own tokens can't see; truncate
    then forgets the padding."""
    device = model.embed.weight.device
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    idx = nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(device)  # (B, T)
    lengths = torch.tensor([len(row) for row in rows], device=device)  # (B,)
    x = model.hidden(idx, cache)     # (B, T, C)
    cache.truncate(lengths)
    each_row = torch.arange(len(rows), device=device)
    last = x[each_row, lengths - 1]  # (B, C)
    return model.head(last)          # (B, V)


def random_numbers(model, prompts, repeat, n, seed):
    """Numbers in [0, 1), (prompts * repeat, n). Sample j of every prompt gets those of
    (seed, j), so that a row does not depend on what else is in the batch."""
    of_sample = []
    for j in range(repeat):
        generator = torch.Generator().manual_seed(2 ** 20 * seed + j)
        of_sample.append(torch.rand(n, generator=generator))
    return torch.stack(of_sample).repeat(prompts, 1).to(model.embed.weight.device)


def cache_for(model, prompts, max_new_tokens):
    """A cache for these prompts, lists of ids, and what is written after them."""
    longest = max(map(len, prompts)) + max_new_tokens
    max_len = min(model.cfg.block_size, longest)
    weight = model.embed.weight
    return KVCache(model.cfg, len(prompts), max_len, weight.device, weight.dtype)


def slide(rows, max_len):
    """Cuts each row longer than max_len to its newest half; the other rows stay as they are."""
    for row in rows:
        if len(row) > max_len:
            del row[:-max(1, max_len // 2)]


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=0, repeat=1,
             alive=None, cache=None, step=None):
    """Yields one (B,) tensor of ids per step, max_new_tokens times, or until no row is alive.

    idx: prompts, (B, T) or a list of 1-D tensors; each is read once and continued `repeat`
    times. alive: one bool per row, in a list that the caller may change between steps; a dead
    row gives -1. cache: one row per prompt; it is emptied, and widened by `repeat`. step: the
    model, compiled. A row that outgrows the cache goes on from the newest half of its tokens.
    Raises ValueError for impossible arguments, FloatingPointError for logits that aren't finite.
    """
    prompts = [row.tolist() for row in idx]
    check_generate(model.cfg, prompts, max_new_tokens, temperature, top_k, top_p, repeat)
    alive = alive or [True] * (len(prompts) * repeat)
    noise = random_numbers(model, len(prompts), repeat, max_new_tokens, seed)
    # read the prompts
    cache = cache or cache_for(model, prompts, max_new_tokens)
    cache.truncate(0)
    prompts = [row[-cache.max_len:] for row in prompts]
    logits = prefill(model, prompts, cache)           # (prompts, V)
    cache.repeat(repeat)
    logits = logits.repeat_interleave(repeat, dim=0)  # (B, V)
    # the tokens of each row; the newest is not cached yet
    rows = [list(row) for row in prompts for _ in range(repeat)]
    for n in range(max_new_tokens):
        token = pick(logits, noise[:, n], temperature, top_k, top_p)  # (B,)
        ids = token.tolist()
        if any(i < 0 and on for i, on in zip(ids, alive)):
            raise FloatingPointError('the logits are not finite: the weights are damaged, or fp16 overflows')
        yield torch.tensor([i if on else -1 for i, on in zip(ids, alive)])
        if n + 1 == max_new_tokens or not any(alive):
            return
        # a dead row stays in the batch, without tokens, and leaves the cache
        for row, i, on in zip(rows, ids, alive):
            row.append(i)
            if not on:
                row.clear()
        if not all(alive):
            cache.truncate(torch.tensor([max(0, len(row) - 1) for row in rows]))
        # read one more token per row, or all rows again
        if max(map(len, rows)) <= cache.max_len:
            logits = (step or model)(token.clamp(min=0)[:, None], cache=cache)[:, -1]  # (B, V)
        else:
            slide(rows, cache.max_len)
            cache.truncate(0)
            logits = prefill(model, rows, cache)      # (B, V)


# -------------------------------------------------------------------------------
# Arithmetic


def matmul_params(cfg):
    """The N of "2N FLOPs per token": the weights that a token is multiplied with. The head is
    among them. The embedding is not: it is looked up. Of the experts those count that a token
    visits."""
    C, H, D = cfg.n_embd, cfg.n_head, cfg.head_dim
    # attention, per layer
    if cfg.kv_rank:
        queries = C * cfg.q_rank + cfg.q_rank * H * D if cfg.q_rank else C * H * D
        latent = C * (cfg.kv_rank + cfg.rope_dim)
        keys_values = cfg.kv_rank * H * (D - cfg.rope_dim + cfg.v_dim)
        attention = queries + latent + keys_values + H * cfg.v_dim * C
    else:
        attention = C * (H + 2 * cfg.n_kv_head) * D + H * D * C
    # the MLP or the experts, per layer
    matrices = 3 if cfg.mlp == 'swiglu' else 2
    dense = matrices * C * cfg.d_ff
    router = C * cfg.n_expert
    experts = router + matrices * C * cfg.d_expert * (cfg.n_active + cfg.n_shared)
    # layers of each kind
    n_with_experts = max(0, cfg.n_layer - cfg.n_dense) if cfg.n_expert else 0
    n_dense = cfg.n_layer - n_with_experts
    return cfg.n_layer * attention + n_dense * dense + n_with_experts * experts + C * cfg.vocab_rows


def flops_per_token(cfg, T):
    """FLOPs per token of a forward pass over T tokens: 2N for the matrices, and 2 L T H
    (D + v_dim) for the scores and the values, which is 4 L T C where H D = C. All T x T scores
    count (PaLM, arXiv:2204.02311, appendix B), though a causal kernel makes only half of them.
    Training costs 3 times this: the backward pass makes two gradients per product."""
    scores_and_values = 2 * cfg.n_layer * T * cfg.n_head * (cfg.head_dim + cfg.v_dim)
    return 2 * matmul_params(cfg) + scores_and_values


def cache_bytes_per_token(cfg, bytes_per_value=2):
    """What a token adds to the cache: 2 L K D values, or L (kv_rank + rope_dim) with latent
    attention."""
    values_per_layer = sum(heads * width for heads, width in cache_shape(cfg))
    return cfg.n_layer * values_per_layer * bytes_per_value


# -------------------------------------------------------------------------------
# Checks


def refuse_if(wrong, sentence):
    if wrong:
        raise ValueError(sentence)


WORDS = {
    'norm': ('rms', 'layer'),
    'mlp': ('swiglu', 'gelu', 'gelu_tanh'),
    'wiring': ('pre', 'post', 'parallel'),
    'pos': ('rope', 'learned'),
}
AT_LEAST_1 = ('vocab_size', 'vocab_multiple', 'block_size', 'n_layer', 'n_head', 'n_embd', 'n_active')


def check_config(cfg):
    """Raises ValueError, with the numbers that clash, for values that no model can have."""
    for name, value in cfg.given.items():
        if name in WORDS:
            known = ', '.join(WORDS[name])
            refuse_if(value not in WORDS[name], f'{name} is {value!r}, but must be one of {known}')
        elif isinstance(value, int | float):
            least = 1 if name in AT_LEAST_1 else 0
            refuse_if(not least <= value < math.inf, f'{name} is {value}, but must be at least {least}')
    refuse_if(cfg.dropout >= 1, f'dropout is {cfg.dropout}, but must be below 1')
    refuse_if(cfg.rope_base <= 1, f'rope_base is {cfg.rope_base}, but must be above 1')
    refuse_if(cfg.window and not cfg.causal, f'window {cfg.window} needs causal=true')

    # heads
    n_kv_head = cfg.n_kv_head or cfg.n_head
    refuse_if(cfg.n_head % n_kv_head, f'n_head {cfg.n_head} is no multiple of n_kv_head {n_kv_head}')
    refuse_if(not cfg.head_dim and cfg.n_embd % cfg.n_head,
              f'n_embd {cfg.n_embd} is no multiple of n_head {cfg.n_head}: change one or set head_dim')
    head_dim = cfg.head_dim or cfg.n_embd // cfg.n_head

    # rotary positions
    rotated = cfg.rope_dim or head_dim
    refuse_if(cfg.pos == 'rope' and rotated % 2, f'rope rotates pairs, but {rotated} dimensions are odd')
    if cfg.rope_scaling:
        refuse_if(cfg.pos != 'rope', f'rope_scaling {cfg.rope_scaling} needs pos=rope')
        parse_rope_scaling(cfg.rope_scaling)

    # experts
    if cfg.n_expert:
        refuse_if(cfg.n_active > cfg.n_expert, f'n_active {cfg.n_active} is more than n_expert {cfg.n_expert}')
        refuse_if(cfg.mlp != 'swiglu' or cfg.bias, 'experts need mlp=swiglu and bias=false')
    else:
        refuse_if(cfg.n_shared or cfg.n_dense, 'n_shared and n_dense belong to experts: set n_expert too')
    check_latent(cfg, n_kv_head, head_dim)


def check_latent(cfg, n_kv_head, head_dim):
    v_dim = cfg.v_dim or head_dim
    if cfg.kv_rank:
        refuse_if(not 0 < cfg.rope_dim < head_dim or v_dim > head_dim,
                  f'rope_dim {cfg.rope_dim} and v_dim {v_dim} must fit into head_dim {head_dim}')
        refuse_if(cfg.pos != 'rope' or n_kv_head != cfg.n_head or cfg.bias or cfg.qkv_bias or cfg.qk_norm,
                  'latent attention needs pos=rope, n_kv_head=0, no biases, no qk_norm')
    else:
        refuse_if(cfg.rope_dim or cfg.q_rank or v_dim != head_dim,
                  'rope_dim, q_rank and v_dim belong to latent attention: set kv_rank too')


def check_room(cfg, x, cache):
    B, T = x.shape[:2]
    refuse_if(T > cfg.block_size, f'{T} tokens are more than block_size {cfg.block_size}')
    if cache is not None:
        n_rows = len(cache.lengths)
        refuse_if(B != n_rows, f'{B} rows of tokens do not fit a cache of {n_rows} rows')


def check_cache(cfg, max_len):
    refuse_if(not cfg.causal, 'causal=false: an encoder sees all tokens at once, so it has no cache')
    refuse_if(max_len > cfg.block_size,
              f'a cache of {max_len} tokens is longer than block_size {cfg.block_size}')


def check_generate(cfg, prompts, max_new_tokens, temperature, top_k, top_p, repeat):
    refuse_if(not cfg.causal, 'causal=false: an encoder does not generate')
    refuse_if(not prompts or not all(prompts), 'a prompt is empty: give it at least one token')
    for row in prompts:
        refuse_if(min(row) < 0 or max(row) >= cfg.vocab_size, f'ids must lie in [0, {cfg.vocab_size})')
    refuse_if(max_new_tokens < 0, f'max_new_tokens is {max_new_tokens}, but must be 0 or more')
    refuse_if(not 0 <= temperature < math.inf, f'temperature is {temperature}, but must be 0 or more')
    refuse_if(top_k < 0, f'top_k is {top_k}, but must be 0 (off) or more')
    refuse_if(not 0 <= top_p <= 1, f'top_p is {top_p}, but must be in [0, 1]')
    refuse_if(repeat < 1, f'repeat is {repeat}, but must be at least 1')
