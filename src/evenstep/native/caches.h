/* Makes oneDNN, inside a loaded library, cut its work for caches of fixed sizes.
 *
 * It cuts convolutions for the caches that it finds, and how they are cut changes the order of sums. What it found is in
 * a record that it made once; there are no settings for it. The record and the functions around it are not exported, so
 * they are looked up in the symbol table of the library's file.
 */
#ifndef EVENSTEP_CACHES_H
#define EVENSTEP_CACHES_H

/* Per core: the sizes that oneDNN assumes where a processor does not say. */
enum { ES_L1 = 32 << 10, ES_L2 = 512 << 10, ES_L3 = 1 << 20 };

/* Pins them for the life of the process in the loaded library whose file name is `library`, and forgets the kernels that
 * were made for others. Call it from one thread; a second call changes nothing.
 * 0: done, and oneDNN says so. -1: no such library is loaded. -2: its file cannot be read (errno says why). -3: oneDNN is
 * not there, or not as we know it; nothing was changed. */
int es_pin_caches(const char *library);

/* What oneDNN now takes a core's cache of this level (1 to 3) to be, 0 if nothing was pinned. */
unsigned es_cache_bytes(int level);

#endif
