"""The functions of JAX arrays that follow from their rows alone."""

from attnmask._faces import linear, sums
from attnmask._faces.attention import CACHE, WRITE
from attnmask.jax._attention import IN_JAX, Attention
from attnmask.jax._cache import Attend, Write
from attnmask.jax._faces import jax_face

flash_attention = jax_face(IN_JAX, Attention)
flash_attention_with_kvcache = jax_face(CACHE, Attend)
write_kvcache = jax_face(WRITE, Write)
linear_attention = jax_face(linear.LINEAR_ATTENTION)
linear_attention_step = jax_face(linear.LINEAR_ATTENTION_STEP)
short_convolution = jax_face(linear.SHORT_CONVOLUTION)
short_convolution_step = jax_face(linear.SHORT_CONVOLUTION_STEP)
chunk_local_cumsum = jax_face(sums.CHUNK_LOCAL_CUMSUM)
chunk_local_cumsum_scalar = jax_face(sums.CHUNK_LOCAL_CUMSUM_SCALAR)
chunk_local_cumsum_vector = jax_face(sums.CHUNK_LOCAL_CUMSUM_VECTOR)
chunk_global_cumsum = jax_face(sums.CHUNK_GLOBAL_CUMSUM)
chunk_global_cumsum_scalar = jax_face(sums.CHUNK_GLOBAL_CUMSUM_SCALAR)
chunk_global_cumsum_vector = jax_face(sums.CHUNK_GLOBAL_CUMSUM_VECTOR)
