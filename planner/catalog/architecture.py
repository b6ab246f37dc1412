"""A transformer's dimensions, as far as parameters, FLOPs and activations depend on them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head or grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    bias_in: bool
    """Biases of the query, key and value projections."""
    bias_out: bool
    norm_heads: bool = False
    """Norms of queries and keys, one weight for each dimension of a head."""

    @property
    def query(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def values(self) -> int:
        """Width of the output before its projection."""
        return self.query

    @property
    def scores_dim(self) -> int:
        """Dimensions of a head that a score, and a weighted value, sum over."""
        return 2 * self.head_dim

    @property
    def kept(self) -> int:
        """Elements a token that the backward needs: queries, keys, values and the output."""
        return 2 * self.query + 2 * self.kv_heads * self.head_dim

    def matrices(self, hidden: int) -> int:
        """Elements of the weight matrices."""
        return hidden * (2 * self.query + 2 * self.kv_heads * self.head_dim)

    def vectors(self, hidden: int) -> int:
        """Elements of biases and norms."""
        biases = (self.query + 2 * self.kv_heads * self.head_dim) * self.bias_in + hidden * self.bias_out
        return biases + 2 * self.head_dim * self.norm_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    heads: int
    query_rank: int
    """0: queries are projected at once."""
    kv_rank: int
    plain_dim: int
    """Dimensions of a head without position."""
    rotary_dim: int
    value_dim: int

    @property
    def scores_dim(self) -> int:
        """Dimensions of a head that a score, and a weighted value, sum over."""
        return self.plain_dim + self.rotary_dim + self.value_dim

    @property
    def kept(self) -> int:
        """Elements a token: both ranks before and after their norm, queries, keys, values, the output."""
        key = self.plain_dim + self.rotary_dim
        ranks = 2 * self.query_rank + 2 * self.kv_rank + self.rotary_dim
        return ranks + self.heads * (2 * key + 2 * self.value_dim)

    def matrices(self, hidden: int) -> int:
        """Elements of the weight matrices."""
        key = self.plain_dim + self.rotary_dim
        query = (
            self.query_rank * (hidden + self.heads * key) if self.query_rank else hidden * self.heads * key
        )
        down = hidden * (self.kv_rank + self.rotary_dim)
        up = self.kv_rank * self.heads * (self.plain_dim + self.value_dim)
        return query + down + up + self.heads * self.value_dim * hidden

    def vectors(self, hidden: int) -> int:
        """Elements of the norms of both ranks."""
        return self.query_rank + self.kv_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """A dense MLP: two matrices, or three where it is gated."""

    width: int
    gated: bool
    bias: bool = False

    @property
    def kept(self) -> int:
        """Elements a token: input and output of the activation; where gated, the gate, its activation, the
        other factor and the product.
        """
        return (4 if self.gated else 2) * self.width

    def matrices(self, hidden: int) -> int:
        """Elements of the weight matrices."""
        return (3 if self.gated else 2) * hidden * self.width

    def vectors(self, hidden: int) -> int:
        """Elements of the biases."""
        return (self.width + hidden) * self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of equal experts, beside them shared ones that see every token."""

    count: int
    per_token: int
    expert: FeedForward
    shared: FeedForward | None = None
    shared_gate: bool = False
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model: embedding, equal layers but for those with experts, head."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: Attention | LatentAttention
    mlp: FeedForward
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts in a model that has some."""
    norm_vectors: int
    """Vectors of a norm: 1 (RMSNorm) or 2 (LayerNorm)."""
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_width: int | None = None
    """Where embeddings are narrower than the model, with a projection on both ends."""
    positions: int = 0
    """Learned positions; 0 for rotary ones."""
    longest: int | None = None
    """Longest sequence where positions are learned, or None."""
    token_types: int = 0
    tied: bool
    head_transform: bool = False
    """BERT's: a dense layer, a norm and a bias of the vocabulary before and after the tied matrix."""

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture."""
        return self.experts is not None and layer not in self.dense_layers
