"""A small decoder with sparse attention, for tests and as a reference of backends that bake shapes.

It is a Llama whose attention reads a local window, the blocks that an indexer picks, and compressed groups;
see `kernels.sparse_attention`. No published checkpoint has this architecture. It has the parts that make the
attention of large sparse models (DeepSeek-V4) depend on the shape of a batch: an indexer per query, and side
caches that a forward writes every few tokens.

config.json has the keys of a Llama, and of sparse attention
    index_n_heads           query heads of the indexer (2)
    index_topk              blocks that a query picks (8)
    index_block_size        tokens per block (4)
    compressed_block_size   tokens per compressed key and value (128)
    local_window            tokens that a query sees one by one, at least (64)

Legend: T tokens, H hidden size, N query heads, I heads of the indexer, K key/value heads, D head dimension.
"""

from dataclasses import dataclass, fields

import torch

from ...kernels.row_ops import RowOps
from ...kernels.sparse_caches import SparseSizes
from ..errors import CheckpointError
from ..kv.layouts import MHALayout
from ..kv.sparse_layout import SparseLayout
from .config import ModelConfig, read_dense_config
from .config_reader import ConfigReader
from .layers import Attend, DecoderLayer, GatedMLP, Linear, NamedTensors, Normed, RMSNorm, SelfAttention
from .llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class SparseConfig(ModelConfig):
    """A dense config with the sizes of sparse attention, in heads, blocks and tokens."""

    index_heads: int
    index_topk: int
    index_block: int
    compressed_block: int
    window: int

    @property
    def has_choices(self) -> bool:
        return True

    @property
    def query_heads(self) -> int:
        return self.num_heads + self.index_heads


def read_sparse_config(reader: ConfigReader, *, architecture: str) -> SparseConfig:
    """The config of a sparse model, with the EOS ids of generation_config.json beside it.

    Raises CheckpointError, naming file, key, value and remedy, for a missing, malformed or unsupported
    setting.
    """
    dense = read_dense_config(reader, architecture=architecture)
    block, group = reader.count("index_block_size", 4), reader.count("compressed_block_size", 128)
    if group % block:
        raise reader.error("compressed_block_size", f"it must be a multiple of index_block_size = {block}")
    return SparseConfig(
        **{field.name: getattr(dense, field.name) for field in fields(dense)},
        index_heads=reader.count("index_n_heads", 2),
        index_topk=reader.count("index_topk", 8),
        index_block=block,
        compressed_block=group,
        window=reader.count("local_window", 64),
    )


class SparseSelfAttention(SelfAttention):
    """Attention whose queries are followed by those of the indexer, scaled by a gate per head.

    The queries of the indexer are rotated like the others, because they meet means of rotated keys.
    """

    def __init__(self, config: SparseConfig, dtype: torch.dtype, device: torch.device, ops: RowOps) -> None:
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            ops=ops,
        )
        self.index_heads = config.index_heads
        parts = {"index_q_proj": config.index_heads * config.head_dim, "index_gate_proj": config.index_heads}
        self.index = Linear(config.hidden_size, parts, bias=False, dtype=dtype, device=device, ops=ops)

    def takes_unscaled(self, num_rows: int) -> bool:
        """As `Attention.takes_unscaled`: the indexer reads the rows, too."""
        return False

    def attended(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """`x` `[T, H]`, rotary tables `[T, D]` -> `[T, N*D]`."""
        assert isinstance(x, torch.Tensor), "this layer takes no unscaled rows"
        rows, heads = x.shape[0], self.num_heads
        found = self.qkv(x).view(rows, heads + 2 * self.num_kv_heads, self.head_dim)
        qk, v = found[:, : heads + self.num_kv_heads], found[:, heads + self.num_kv_heads :]
        index = self.index(x)
        split = self.index_heads * self.head_dim
        queries = index[:, :split].view(rows, self.index_heads, self.head_dim)
        turned = self.ops.rope(torch.cat((qk, queries), dim=1), cos, sin)
        q, k, queries = torch.split(turned, [heads, self.num_kv_heads, self.index_heads], dim=1)
        gated = queries * torch.sigmoid(index[:, split:])[:, :, None]
        return attend(layer, torch.cat((q, gated), dim=1), k, v)[:, :heads].flatten(1)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from super().tensors(prefix)
        yield from self.index.tensors(prefix)


class SparseBlockForCausalLM(LlamaForCausalLM):
    """A `CausalLM` with allocated, uninitialised weights, for a SparseConfig."""

    def decoder_layer(self, layer: int) -> DecoderLayer:
        """Layer `layer`, with uninitialised weights; all layers are alike."""
        config, dtype, device, ops = self._sparse, self.dtype, self.device, self.ops
        width, eps = config.hidden_size, config.rms_norm_eps
        mlp = GatedMLP(
            width, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device, ops=ops
        )
        norm, post_norm = (RMSNorm(width, eps, dtype=dtype, device=device, ops=ops) for _ in range(2))
        return DecoderLayer(SparseSelfAttention(config, dtype, device, ops), mlp, norm, post_norm)

    def kv_layout(self, page_size: int) -> SparseLayout:
        """The layout of this model's KV and side caches in pages of `page_size` tokens.

        Raises CheckpointError for a page size that blocks and groups do not fit.
        """
        config = self._sparse
        sizes = SparseSizes(
            num_layers=config.num_layers,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            index_heads=config.index_heads,
            index_block=config.index_block,
            dense_block=config.compressed_block,
            top_k=config.index_topk,
            window=config.window,
        )
        try:
            dense = MHALayout.of(config, num_layers=config.num_layers, page_size=page_size, dtype=self.dtype)
            return SparseLayout.with_caches(dense, sizes)
        except ValueError as error:
            raise CheckpointError(f"{config.architecture}: {error}") from None

    @property
    def _sparse(self) -> SparseConfig:
        assert isinstance(self.config, SparseConfig), self.config
        return self.config
