#define _GNU_SOURCE
#include "caches.h"

#if defined(__x86_64__)
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* oneDNN's record of the processor (Xbyak's Cpu): how large its data caches are, how many cores share each, how many
 * levels there are. */
typedef struct {
    char other[24];
    uint32_t sizes[10], sharing[10], levels;
} processor;

static struct {
    processor *(*record)(void);
    unsigned (*per_core)(int level);
    int (*get_capacity)(int *), (*set_capacity)(int);
} onednn;

static const struct {
    const char *name;
    void *into;
} wanted[] = {
    {"_ZN4dnnl4impl3cpu3x643cpuEv", &onednn.record},
    {"_ZN4dnnl4impl3cpu8platform23get_per_core_cache_sizeEi", &onednn.per_core},
    {"dnnl_get_primitive_cache_capacity", &onednn.get_capacity},
    {"dnnl_set_primitive_cache_capacity", &onednn.set_capacity},
};
enum { COUNT = sizeof wanted / sizeof wanted[0] };

typedef struct {
    const char *library, *path;
    ElfW(Addr) base;
} place;

static int visit(struct dl_phdr_info *info, size_t size, void *context) {
    place *p = context;
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (strcmp(slash ? slash + 1 : info->dlpi_name, p->library)) return 0;
    p->path = info->dlpi_name;
    p->base = info->dlpi_addr;
    return 1;
}

/* How many of the wanted functions the file has. */
static int look_up(const char *file, size_t size, ElfW(Addr) base) {
    const ElfW(Ehdr) *head = (const void *)file;
    int found = 0;
    if (size < sizeof *head || head->e_shoff + (size_t)head->e_shnum * sizeof(ElfW(Shdr)) > size) return 0;
    const ElfW(Shdr) *sections = (const void *)(file + head->e_shoff);
    for (int s = 0; s < head->e_shnum; ++s) {
        const ElfW(Shdr) *table = sections + s, *texts = sections + table->sh_link;
        if (table->sh_type != SHT_SYMTAB || table->sh_link >= head->e_shnum || table->sh_offset + table->sh_size > size ||
            texts->sh_offset + texts->sh_size > size)
            continue;
        const ElfW(Sym) *symbol = (const void *)(file + table->sh_offset), *end = symbol + table->sh_size / sizeof *symbol;
        for (; symbol < end; ++symbol) {
            if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || symbol->st_name >= texts->sh_size) continue;
            const char *name = file + texts->sh_offset + symbol->st_name;
            for (int i = 0; i < COUNT; ++i)
                if (!strcmp(name, wanted[i].name)) {
                    *(void **)wanted[i].into = (void *)(base + symbol->st_value);
                    ++found;
                }
        }
    }
    return found;
}

static int find(const char *library) {
    place p = {.library = library};
    struct stat status;
    if (!dl_iterate_phdr(visit, &p)) return -1;
    int fd = open(p.path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -2;
    char *file = fstat(fd, &status) ? MAP_FAILED : mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) return -2;
    int found = look_up(file, status.st_size, p.base);
    munmap(file, status.st_size);
    return found == COUNT ? 0 : -3;
}

static int pinned;

unsigned es_cache_bytes(int level) { return pinned ? onednn.per_core(level) : 0; }

int es_pin_caches(const char *library) {
    static const uint32_t sizes[3] = {ES_L1, ES_L2, ES_L3};
    if (pinned) return 0;
    int rc = find(library);
    if (rc) return rc;
    processor *record = onednn.record(), before = *record;
    for (int i = 0; i < 3; ++i) record->sizes[i] = sizes[i], record->sharing[i] = 1;
    record->levels = 3;
    for (int i = 0; i < 3; ++i)
        if (onednn.per_core(i + 1) != sizes[i]) { /* the record is not what we took it for */
            *record = before;
            return -3;
        }
    int capacity;
    if (onednn.get_capacity(&capacity) || onednn.set_capacity(0) || onednn.set_capacity(capacity)) {
        *record = before;
        return -3;
    }
    pinned = 1;
    return 0;
}

#else
int es_pin_caches(const char *library) {
    (void)library;
    return -3;
}

unsigned es_cache_bytes(int level) {
    (void)level;
    return 0;
}
#endif
