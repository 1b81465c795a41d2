/* What the loader and the tests ask. */
#include "attention.h"
#include "decoder.h"
#include "linear.h"
#include "store_kv.h"

/* Raised with every change of an exported function or structure; see kernels/cpu/library.py. */
EXPORT int pdserve_abi(void) { return 5; }

/* Whether this processor runs the kernels. */
EXPORT int pdserve_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

EXPORT int pdserve_attention_bytes(void) { return sizeof(Attention); }
EXPORT int pdserve_store_kv_bytes(void) { return sizeof(StoreKV); }
EXPORT int pdserve_decoder_bytes(void) { return sizeof(Decoder); }
EXPORT int pdserve_layer_bytes(void) { return sizeof(Layer); }
EXPORT int pdserve_linear_bytes(void) { return sizeof(Linear); }
