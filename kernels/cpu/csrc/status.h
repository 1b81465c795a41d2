/* What a kernel answers. */
#ifndef PDSERVE_STATUS_H
#define PDSERVE_STATUS_H

enum {
    DONE = 0,
    NO_MEMORY = -1,
    BAD_INDEX = -2, /* lengths, page tables or slots name what does not exist; nothing was written */
};

/* The functions that Python calls. */
#define EXPORT __attribute__((visibility("default")))

#endif
