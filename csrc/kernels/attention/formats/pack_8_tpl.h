/* pack_8_tpl.h – packs keys and values of eight bits as bf16x2. */
#if !defined T || !defined NUMBER || !defined LOAD_SOME || !defined FROM
#    error "pack_8_tpl.h needs f32.h, NUMBER (an element), LOAD_SOME (some as bfloat16) and FROM(name)"
#endif

typedef struct {
    NUMBER both[2];
} FROM(pair);
#define S FROM(pair)
#define LOAD(pairs) LOAD_SOME((pairs)->both, 2 * LANES)
#define LOAD_PART(pairs, count) LOAD_SOME((pairs)->both, 2 * (count))
#include "kernels/attention/formats/pack_keys_tpl.h"
#undef S
#undef LOAD
#undef LOAD_PART

#define S NUMBER
#include "kernels/attention/formats/pack_pairs_tpl.h"
#undef NUMBER
