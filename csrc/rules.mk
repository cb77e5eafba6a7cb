# rules.mk – with what the core is compiled, for setup.py, which reads these lines, and for make (lib.mk): the flags of
# each level of instruction sets, and which files among kernels a level has of its own. core/runtime/isa.c takes the
# rest from the level below. A line is a name, := and words; $(NAME) is a line above.

# Floating-point contraction stays off: a result must not depend on where a vector ends and its tail begins.
CFLAGS_CORE := -std=gnu11 -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math
CFLAGS_CORE := $(CFLAGS_CORE) -Wall -Wextra -Wshadow -Wstrict-prototypes -pthread
CFLAGS_KERNELS := -fno-lto

# In the order in which the dispatcher climbs them.
LEVELS_x86_64 := avx2 avx512 avx512vnni avx512bf16 amx
LEVELS_aarch64 := neondot neonbf16

FLAGS_avx2 := -mavx2 -mfma -mf16c -mbmi -mbmi2
FLAGS_avx512 := $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
FLAGS_avx512vnni := $(FLAGS_avx512) -mavx512vnni
FLAGS_avx512bf16 := $(FLAGS_avx512vnni) -mavx512bf16
FLAGS_amx := $(FLAGS_avx512bf16) -mamx-tile -mamx-bf16
FLAGS_neondot := -march=armv8.2-a+dotprod
FLAGS_neonbf16 := -march=armv8.2-a+bf16

# What assemblers may not know that are older than their compiler.
INSTRUCTION_avx512bf16 := vdpbf16ps %zmm0, %zmm0, %zmm0
INSTRUCTION_amx := tdpbf16ps %tmm0, %tmm1, %tmm2
INSTRUCTION_neondot := sdot v0.4s, v0.16b, v0.16b
INSTRUCTION_neonbf16 := bfmmla v0.4s, v0.8h, v0.8h

TOPICS_baseline := arrays flash_f32 flash_f64 kv_f32 kv_f16 kv_bf16 kv_i8 kv_f8 conv_f32 conv_f64 linear
TOPICS_avx2 := $(TOPICS_baseline) kv_i16x2
TOPICS_avx512 := $(TOPICS_avx2)
TOPICS_avx512vnni := kv_i16x2
TOPICS_neondot := kv_i16x2
TOPICS_neonbf16 := flash_bf16x2 kv_bf16x2 linear_bf16x2
TOPICS_avx512bf16 := $(TOPICS_neonbf16) kv_f8x2
TOPICS_amx := flash_amx

# What follows is left out where a compiler does not know it.
# GCC would load the numbers of several rows before it multiplies the first, for which there are no registers.
FLAGS_ARM := -fno-schedule-insns
# Else code elsewhere decides where in a line of the cache a kernel's loops begin, and how fast they are: positions of
# tokens took 0.134 or 0.152 ms.
FLAGS_ALIGNED := -falign-functions=64 -falign-loops=64
# An outer loop runs the padding before its inner loop each time, and in these files inner loops are short. Time with
# these flags: at the baseline 0.87 for 8 and 16 rows over float32 caches, 0.75 for one row over int4 caches; at avx2
# 0.985 for 8 rows over bfloat16 caches.
FLAGS_OF_baseline/kv_f32 := -falign-loops=1 -ftree-pre
FLAGS_OF_baseline/kv_i8 := -falign-loops=1 -ftree-pre
FLAGS_OF_avx2/kv_bf16 := -falign-loops=32
# Partial redundancy elimination takes a fifteenth of a build, and makes no kernels faster but those of arrays.
FLAGS_NO_PRE := -fno-tree-pre
