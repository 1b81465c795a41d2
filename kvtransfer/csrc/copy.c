/* Copies pages from one pool into another; see kvtransfer/page_copy.py. */
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, AHEAD = 1024 };

/* Writes past the caches, so that no line is read only to be written over. */
static void stream(char *to, const char *from, int64_t num_bytes) {
    int64_t head = -(intptr_t)to & (LINE - 1);
    if (head > num_bytes) head = num_bytes;
    memcpy(to, from, (size_t)head);
    for (to += head, from += head, num_bytes -= head; num_bytes >= LINE; to += LINE, from += LINE, num_bytes -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T0); /* beyond the end: of no effect */
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, (size_t)num_bytes);
}

/* Page out_of_ids[i] of one pool becomes page into_ids[i] of another, for each i in [first, first + count). The number in
 * the name is raised with every change of the arguments. */
__attribute__((visibility("default"))) void pdserve_copy_pages_1(char *into, const char *out_of, const int64_t *into_ids,
                                                                 const int64_t *out_of_ids, int64_t first,
                                                                 int64_t count, int64_t page_bytes, int past_caches) {
    for (int64_t i = first; i < first + count; i++) {
        char *to = into + into_ids[i] * page_bytes;
        const char *from = out_of + out_of_ids[i] * page_bytes;
        if (past_caches)
            stream(to, from, page_bytes);
        else
            memcpy(to, from, (size_t)page_bytes);
    }
    _mm_sfence(); /* who is told that the pages are here sees them */
}
