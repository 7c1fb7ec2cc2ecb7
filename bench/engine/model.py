"""A target and a head of random weights, built so that the target accepts a chosen number of drafts.

A target accepts no draft of a random head, so acceptance is built into the weights, and the engine runs
unchanged. No layer of the target writes column LEVEL of the residual stream, so that column is constant, and
it makes TOKEN the likeliest token for any values of the other columns. The head copies LEVEL from its
features. Its MLP adds STEP to column COUNT in every forward, so the n-th draft of a step sees a count of n.
The output projection's weights of both columns make that draft TOKEN while n is below the accept length, and
WRONG from there on. All other weights are random.
"""

import re

import torch

from ...engine.models.config import ModelConfig
from ...engine.models.interface import CausalLM, StoredForms
from ...engine.models.registry import Joins, build_model
from ...engine.parallel.sharing import ALONE, Sharing
from ...engine.speculative.drafters.eagle3_head import Eagle3Head
from ...engine.speculative.drafters.eagle_config import EagleConfig
from ...engine.speculative.drafters.eagle_head import EagleHead
from ...engine.speculative.drafters.spec_config import Eagle3Config

LEVEL, COUNT = 0, 1  # columns of the residual stream
TOKEN, WRONG = 1, 3  # the target's output, and the head's draft beyond the accept length
# The matrices that read the residual stream of a layer.
READERS = re.compile(r"\.(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa|gate_proj|up_proj|w1|w3)\.weight$")
SPREAD = 0.02  # standard deviation of random weights
FP8_SPREAD = 64.0  # of stored values in 8 bits, before their scales
INT4_SPREAD = 4.6  # of equally likely values of 4 bits
MXFP4_SCALE = 120  # 2^-7, by which equally likely values of MXFP4 spread by 0.023
AMPLITUDE = 64.0  # value of LEVEL in the target's stream
GAIN = 256.0  # from the target's LEVEL to the head's, where LEVEL outweighs all other columns together
STEP = AMPLITUDE * GAIN / 16  # added to COUNT by each forward of the head


@torch.no_grad()
def random_target(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    is_invariant: bool = False,
    joins: Joins | None = None,
    sharing: Sharing = ALONE,
) -> CausalLM:
    """A model of `config` that generates TOKEN after any input; `is_invariant` and `joins` as of
    `build_model`. As a rank in `sharing`, `config` is the rank's; rank 0 has the rows of TOKEN.
    """
    model = build_model(
        config, dtype=dtype, device=device, is_invariant=is_invariant, joins=joins, sharing=sharing
    )
    _fill_target(model, seed, sharing)
    if isinstance(model, StoredForms):
        model.projections.finish()
    return model


@torch.no_grad()
def stored_target(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalLM:
    """As `random_target`, with the tensors of a checkpoint: `projections.finish` is left to its readers."""
    model = build_model(config, dtype=dtype, device=device)
    _fill_target(model, seed, ALONE)
    return model


def _fill_target(model: CausalLM, seed: int, sharing: Sharing) -> None:
    """Fills the tensors of `model` as a checkpoint has them. As a rank in `sharing` it has a part of them."""
    config, generator = model.config, torch.Generator(model.device).manual_seed(seed)
    for name, weight in model.tensors():
        fill_stored(name, weight, generator)
        if re.search(r"\.(o_proj|down_proj|w2)\.", name):  # these write to the residual stream
            if name.endswith("scales"):
                weight[:, LEVEL] = 0
            elif weight.dtype != torch.int32 and "_scale" not in name:  # a scale in blocks has more rows
                weight[LEVEL] = 0
        if name.endswith("experts.down_proj"):  # of gpt-oss: [E, I, H], and its bias [E, H]
            weight[..., LEVEL] = 0
        if name.endswith(("experts.down_proj_bias", "experts.down_proj_blocks")):
            weight[:, LEVEL] = 0
        if re.search(r"\.(mlp|block_sparse_moe)\.(gate|router)\.weight$", name):
            weight[:, LEVEL] = 0  # rows choose experts by what they attended to, not all alike
        if config.moe is not None and weight.dtype == model.dtype and READERS.search(name):
            weight[:, LEVEL] = 0  # and all that they attend to and compute depends on their own tokens
    model.embed_tokens[:, LEVEL] = AMPLITUDE / 2
    if not config.tie_word_embeddings:
        model.lm_head[:, LEVEL] = 0
    if sharing.tensor.rank:
        return
    if config.moe is not None:
        model.embed_tokens[TOKEN] = 0
    model.embed_tokens[TOKEN, LEVEL] = AMPLITUDE
    if not config.tie_word_embeddings:
        model.lm_head[TOKEN, LEVEL] = 16.0


@torch.no_grad()
def random_answers(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalLM:
    """A model of `config` with random weights alone, for which all tokens are about equally likely.

    Its tensors are those of a checkpoint, as of `stored_target`.
    """
    model = build_model(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.tensors():
        fill_stored(name, weight, generator)
    return model


@torch.no_grad()
def random_head(
    config: Eagle3Config, accept_length: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> Eagle3Head:
    """A head of `config`. A target of `random_target` accepts `accept_length` - 1 of its drafts per step."""
    head = Eagle3Head(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in head.tensors():
        fill_random(name, weight, generator)
    head.lm_head = torch.empty(config.draft_vocab_size, config.hidden_size, dtype=dtype, device=device)
    fill_random("lm_head", head.lm_head, generator)
    columns = [LEVEL, COUNT]
    head.fc.weight[columns] = 0
    head.fc.weight[LEVEL, LEVEL] = GAIN
    head.layer.attention.output.weight[columns] = 0
    _count(head)
    head.lm_head[:, columns] = 0
    head.lm_head[TOKEN, LEVEL] = 1.0
    head.lm_head[WRONG, COUNT] = AMPLITUDE * GAIN / STEP / (accept_length - 0.5)
    return head


@torch.no_grad()
def random_eagle(config: EagleConfig, dtype: torch.dtype, device: torch.device, seed: int = 1) -> EagleHead:
    """An EAGLE head of `config` with random weights, which drafts any token."""
    head = EagleHead(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in head.tensors():
        fill_random(name, weight, generator)
    return head


def _count(head: Eagle3Head) -> None:
    """One neuron of the MLP reads LEVEL and adds STEP to COUNT.

    LEVEL outweighs the other columns. After the norm it therefore equals the square root of the width.
    """
    normed = head.config.hidden_size**0.5
    gate, up = head.layer.mlp.gate_up.weight.chunk(2)
    gate[0], up[0] = 0, 0
    gate[0, LEVEL], up[0, LEVEL] = 4.0 / normed, 1.0 / normed
    fired = float(torch.nn.functional.silu(torch.tensor(4.0)))
    head.layer.mlp.down.weight[[LEVEL, COUNT]] = 0
    head.layer.mlp.down.weight[COUNT, 0] = STEP / fired


def fill_stored(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """As `fill_random`, also for the tensors of quantised matrices, whose values then spread alike."""
    if weight.dtype == torch.uint8:
        weight.fill_(MXFP4_SCALE) if name.endswith("_scales") else weight.random_(0, 256, generator=generator)
    elif name.endswith("scales"):
        weight.fill_(SPREAD / INT4_SPREAD)
    elif "_scale" in name:
        weight.fill_(SPREAD / FP8_SPREAD)
    elif weight.dtype == torch.int32:
        weight.random_(-(2**31), 2**31, generator=generator)
        if name.endswith("qzeros"):  # 7 or 8, so that values have no mean, which every layer would multiply
            weight.bitwise_and_(0x11111111).add_(0x77777777)
    elif weight.dtype == torch.float8_e4m3fn:
        values = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        weight.copy_(values.normal_(0, FP8_SPREAD, generator=generator))
    else:
        fill_random(name, weight, generator)


def fill_random(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Ones for the weight `name` of a norm, small random values for any other."""
    if "norm" in name:
        weight.fill_(1)
    else:
        weight.normal_(0, SPREAD, generator=generator)
