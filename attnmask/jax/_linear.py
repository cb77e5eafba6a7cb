"""Linear attention and short convolutions for JAX."""

from attnmask._faces import linear as rows
from attnmask.jax._faces import jax_face

linear_attention = jax_face(rows.LINEAR_ATTENTION)
linear_attention_step = jax_face(rows.LINEAR_ATTENTION_STEP)
short_convolution = jax_face(rows.SHORT_CONVOLUTION)
short_convolution_step = jax_face(rows.SHORT_CONVOLUTION_STEP)
