/* pack_8_tpl.h – packs keys and values of eight bits, NUMBER, as bf16x2. LOAD_SOME loads up to a vector
 * of them as bfloat16. */

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
