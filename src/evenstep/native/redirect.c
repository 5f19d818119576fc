#define _GNU_SOURCE
#include "redirect.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "blas.h"
#include "functions.h"

#if defined(__x86_64__)

typedef struct {
    const char *name;
    void *ours;
} function;

#define VECTOR(name, mkl) {"vms" #mkl, (void *)es_vector_##name##f}, {"vmd" #mkl, (void *)es_vector_##name},
#define FLOAT(name) {#name "f", (void *)es_##name##f},
static const function functions[] = {
    {"sgemm_", (void *)es_sgemm},
    {"dgemm_", (void *)es_dgemm},
    {"sgemv_", (void *)es_sgemv},
    {"dgemv_", (void *)es_dgemv},
    {"sdot_", (void *)es_sdot},
    {"ddot_", (void *)es_ddot},
    {"cblas_sgemm_batch", (void *)es_sgemm_batch},
    {"cblas_dgemm_batch", (void *)es_dgemm_batch},
    {"cblas_gemm_bf16bf16f32", (void *)es_gemm_bf16},
    {"cblas_gemm_f16f16f32", (void *)es_gemm_f16},
    {"spotrf_", (void *)es_spotrf},
    {"vmdLn", (void *)es_vector_log},
    {"vdLn", (void *)es_vector_log}, /* which has no mode */
    VECTOR(sqrt, Sqrt) ES_VECTOR(VECTOR) ES_UNARY(FLOAT) ES_BINARY(FLOAT){"sincosf", (void *)es_sincosf},
};
enum { COUNT = sizeof functions / sizeof functions[0], MAX_SLOTS = 4 * COUNT };

/* Where the addresses are, what was there, and what replaces it. Found once: the library stays where it is. */
static struct {
    void **at, *before, *ours;
} slots[MAX_SLOTS];
static int num_slots;
static char reached[COUNT];

typedef struct {
    const char *library;
    int found;
} search;

static int put(void **at, void *address) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *begin = (void *)((uintptr_t)at & ~(page - 1));
    /* The table may have been made read-only once it was filled in. It stays writable: what else is on the page may be. */
    if (mprotect(begin, page, PROT_READ | PROT_WRITE)) return errno;
    __atomic_store_n(at, address, __ATOMIC_RELEASE);
    return 0;
}

static void note(void **at, const char *name) {
    for (int i = 0; i < COUNT; ++i) {
        if (name[0] != functions[i].name[0] || strcmp(name, functions[i].name) || num_slots == MAX_SLOTS) continue;
        slots[num_slots].at = at;
        slots[num_slots++].ours = functions[i].ours;
        reached[i] = 1;
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *context) {
    search *s = context;
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (strcmp(slash ? slash + 1 : info->dlpi_name, s->library)) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; ++i)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!dynamic) return 0;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t bytes[2] = {0, 0};
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (; dynamic->d_tag != DT_NULL; ++dynamic) {
        ElfW(Addr) at = dynamic->d_un.d_ptr;
        if (at < info->dlpi_addr) at += info->dlpi_addr; /* glibc has added it already; others have not */
        switch (dynamic->d_tag) {
            case DT_JMPREL: tables[0] = (const ElfW(Rela) *)at; break;
            case DT_PLTRELSZ: bytes[0] = dynamic->d_un.d_val; break;
            case DT_RELA: tables[1] = (const ElfW(Rela) *)at; break;
            case DT_RELASZ: bytes[1] = dynamic->d_un.d_val; break;
            case DT_SYMTAB: symbols = (const ElfW(Sym) *)at; break;
            case DT_STRTAB: names = (const char *)at; break;
        }
    }
    s->found = symbols && names;
    for (int t = 0; t < 2 && s->found; ++t)
        for (size_t i = 0; i < bytes[t] / sizeof(ElfW(Rela)); ++i) {
            const ElfW(Rela) *r = tables[t] + i;
            uint32_t type = ELF64_R_TYPE(r->r_info), symbol = ELF64_R_SYM(r->r_info);
            if (symbol && (type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT))
                note((void **)(info->dlpi_addr + r->r_offset), names + symbols[symbol].st_name);
        }
    return 1;
}

int es_redirect(const char *library, void (*missed)(const char *, void *), void *context) {
    if (!num_slots) {
        search s = {.library = library};
        dl_iterate_phdr(visit, &s);
        if (!s.found) return -1;
    }
    for (int i = 0; i < num_slots; ++i) {
        slots[i].before = *slots[i].at;
        int failed = put(slots[i].at, slots[i].ours);
        if (!failed) continue;
        while (i--) put(slots[i].at, slots[i].before);
        errno = failed;
        return -2;
    }
    for (int i = 0; i < COUNT; ++i)
        if (!reached[i]) missed(functions[i].name, context);
    return 0;
}

void es_restore(void) {
    for (int i = 0; i < num_slots; ++i) put(slots[i].at, slots[i].before);
}

#else
int es_redirect(const char *library, void (*missed)(const char *, void *), void *context) {
    (void)library, (void)missed, (void)context;
    return -1;
}

void es_restore(void) {}
#endif
