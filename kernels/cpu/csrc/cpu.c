/* What the loader and the tests ask. */
#include "attention.h"
#include "linear.h"
#include "store_kv.h"

/* Raised with every change of an exported function or structure; see kernels/cpu/library.py. */
EXPORT int pdserve_abi(void) { return 4; }

/* Whether this processor runs the kernels. */
EXPORT int pdserve_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

EXPORT int pdserve_attention_bytes(void) { return sizeof(Attention); }
EXPORT int pdserve_store_kv_bytes(void) { return sizeof(StoreKV); }
EXPORT int pdserve_linear_bytes(void) { return sizeof(Linear); }
