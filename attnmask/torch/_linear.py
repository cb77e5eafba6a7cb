"""Linear attention, short convolutions and cumulative sums for PyTorch."""

from attnmask._faces import linear as rows
from attnmask._faces import sums
from attnmask.torch._faces import torch_face

linear_attention = torch_face(rows.LINEAR_ATTENTION)
linear_attention_step = torch_face(rows.LINEAR_ATTENTION_STEP)
short_convolution = torch_face(rows.SHORT_CONVOLUTION)
short_convolution_step = torch_face(rows.SHORT_CONVOLUTION_STEP)
chunk_local_cumsum = torch_face(sums.CHUNK_LOCAL_CUMSUM)
chunk_local_cumsum_scalar = torch_face(sums.CHUNK_LOCAL_CUMSUM_SCALAR)
chunk_local_cumsum_vector = torch_face(sums.CHUNK_LOCAL_CUMSUM_VECTOR)
chunk_global_cumsum = torch_face(sums.CHUNK_GLOBAL_CUMSUM)
chunk_global_cumsum_scalar = torch_face(sums.CHUNK_GLOBAL_CUMSUM_SCALAR)
chunk_global_cumsum_vector = torch_face(sums.CHUNK_GLOBAL_CUMSUM_VECTOR)
