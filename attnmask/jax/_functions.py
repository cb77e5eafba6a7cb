"""The functions of JAX arrays that follow from their rows alone."""

from attnmask._faces import linear as rows
from attnmask._faces.attention import CACHE, WRITE
from attnmask.jax._cache import Attend, Write
from attnmask.jax._faces import jax_face

flash_attention_with_kvcache = jax_face(CACHE, Attend)
write_kvcache = jax_face(WRITE, Write)
linear_attention = jax_face(rows.LINEAR_ATTENTION)
linear_attention_step = jax_face(rows.LINEAR_ATTENTION_STEP)
short_convolution = jax_face(rows.SHORT_CONVOLUTION)
short_convolution_step = jax_face(rows.SHORT_CONVOLUTION_STEP)
