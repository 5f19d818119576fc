/* The core as a Python module: addresses are plain integers, and whatever can wait or takes long runs without the GIL. */
#include "team.h" /* first: it includes Python.h */

#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "checksum.h"
#include "copy.h"
#include "core.h"
#include "mail.h"
#include "norm.h"
#include "permutation.h"
#include "posts.h"
#include "reduce.h"
#include "rows.h"

#define ARGS(format, ...) \
    if (!PyArg_ParseTuple(args, format, __VA_ARGS__)) return NULL

static PyObject *control_bytes(PyObject *self, PyObject *args) {
    unsigned num_workers;
    Py_ssize_t slot_bytes;
    ARGS("In", &num_workers, &slot_bytes);
    return PyLong_FromSize_t(es_control_bytes(num_workers, (size_t)slot_bytes));
}

static PyObject *init(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned num_workers;
    Py_ssize_t slot_bytes;
    ARGS("KIn", &base, &num_workers, &slot_bytes);
    es_init(AT(base), num_workers, (size_t)slot_bytes);
    Py_RETURN_NONE;
}

static PyObject *describe(PyObject *self, PyObject *args) {
    unsigned long long base;
    ARGS("K", &base);
    if (es_check(AT(base))) Py_RETURN_NONE;
    return Py_BuildValue("(In)", es_num_workers(AT(base)), (Py_ssize_t)es_slot_bytes(AT(base)));
}

static PyObject *post(PyObject *self, PyObject *args) {
    unsigned long long base, seq, data;
    unsigned worker;
    const char *tag;
    Py_ssize_t bytes;
    ARGS("KIKsKn", &base, &worker, &seq, &tag, &data, &bytes);
    if ((size_t)bytes > es_slot_bytes(AT(base))) {
        PyErr_SetString(PyExc_ValueError, "a post does not fit into its slot");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    es_post(AT(base), worker, seq, tag, AT(data), (size_t)bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *collect(PyObject *self, PyObject *args) {
    unsigned long long base, seq, out;
    unsigned worker, spin;
    const char *tag;
    Py_ssize_t bytes;
    long long timeout_ns;
    int rc;
    ARGS("KIKsKnIL", &base, &worker, &seq, &tag, &out, &bytes, &spin, &timeout_ns);
    Py_BEGIN_ALLOW_THREADS
    rc = es_collect(AT(base), worker, seq, tag, AT(out), (size_t)bytes, spin, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(rc);
}

static PyObject *follow(PyObject *self, PyObject *args) {
    unsigned long long base, seq;
    unsigned worker, spin;
    long long timeout_ns;
    int rc;
    ARGS("KIKIL", &base, &worker, &seq, &spin, &timeout_ns);
    Py_BEGIN_ALLOW_THREADS
    rc = es_await(es_posted(AT(base), worker), seq, es_abort_word(AT(base)), spin, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(rc);
}

static PyObject *last_post(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned worker;
    uint64_t seq, number, bytes;
    char tag[ES_TAG_BYTES];
    ARGS("KI", &base, &worker);
    es_last_post(AT(base), worker, &seq, &number, &bytes, tag);
    return Py_BuildValue("(KKNK)", (unsigned long long)seq, (unsigned long long)bytes,
                         PyUnicode_DecodeUTF8(tag, (Py_ssize_t)strlen(tag), "replace"), (unsigned long long)number);
}

static PyObject *abort_all(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned author, culprit;
    const char *text;
    Py_ssize_t bytes;
    ARGS("KIIs#", &base, &author, &culprit, &text, &bytes);
    return PyBool_FromLong(es_abort(AT(base), author, culprit, text, (size_t)bytes));
}

static PyObject *aborted(PyObject *self, PyObject *args) {
    unsigned long long base;
    char text[ES_ERROR_BYTES];
    ARGS("K", &base);
    uint32_t by = es_aborted(AT(base));
    if (!by) Py_RETURN_NONE;
    size_t bytes = es_abort_text(AT(base), text);
    return Py_BuildValue("(IN)", by - 1, PyUnicode_DecodeUTF8(text, (Py_ssize_t)bytes, "replace"));
}

static PyObject *clear_abort(PyObject *self, PyObject *args) {
    unsigned long long base;
    ARGS("K", &base);
    es_clear_abort(AT(base));
    Py_RETURN_NONE;
}

static PyObject *set_pid(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned worker, pid;
    ARGS("KII", &base, &worker, &pid);
    es_set_pid(AT(base), worker, pid);
    Py_RETURN_NONE;
}

static PyObject *pid(PyObject *self, PyObject *args) {
    unsigned long long base;
    unsigned worker;
    ARGS("KI", &base, &worker);
    return PyLong_FromUnsignedLong(es_pid(AT(base), worker));
}

static PyObject *die_with_parent(PyObject *self, PyObject *args) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *interrupt(PyObject *self, PyObject *args) {
    int pid, number;
    ARGS("ii", &pid, &number);
    if (syscall(SYS_tgkill, pid, pid, number)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *checksum(PyObject *self, PyObject *args) {
    unsigned long long data;
    Py_ssize_t num_bytes;
    uint64_t found;
    ARGS("Kn", &data, &num_bytes);
    Py_BEGIN_ALLOW_THREADS
    found = es_checksum(AT(data), (size_t)num_bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *copy(PyObject *self, PyObject *args) {
    unsigned long long target, source, num_bytes;
    ARGS("KKK", &target, &source, &num_bytes);
    Py_BEGIN_ALLOW_THREADS
    es_copy(AT(target), AT(source), num_bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gather(PyObject *self, PyObject *args) {
    unsigned long long target, bases, firsts, starts, row_bytes, num_rows;
    unsigned shift;
    Py_buffer rows;
    int found;
    ARGS("KKKKIKKy*", &target, &bases, &firsts, &starts, &shift, &row_bytes, &num_rows, &rows);
    es_pieces pieces = {AT(bases), AT(firsts), AT(starts), shift, row_bytes, num_rows};
    Py_BEGIN_ALLOW_THREADS
    found = es_gather(AT(target), &pieces, rows.buf, (size_t)rows.len / sizeof(int64_t));
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    return PyBool_FromLong(found);
}

static PyObject *permutation(PyObject *self, PyObject *args) {
    unsigned long long target, count;
    unsigned seed;
    ARGS("KKI", &target, &count, &seed);
    Py_BEGIN_ALLOW_THREADS
    es_permutation(AT(target), count, seed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *levels_are(PyObject *self, PyObject *args) {
    unsigned long long data, num_bytes, count, length;
    unsigned bits, top;
    int found;
    ARGS("KKIKIK", &data, &num_bytes, &bits, &count, &top, &length);
    Py_BEGIN_ALLOW_THREADS
    found = es_levels_are(AT(data), num_bytes, bits, count, top, length);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

static PyObject *load(PyObject *self, PyObject *args) {
    unsigned long long word;
    ARGS("K", &word);
    return PyLong_FromUnsignedLongLong(es_load(AT(word)));
}

static PyObject *store(PyObject *self, PyObject *args) {
    unsigned long long word, value;
    ARGS("KK", &word, &value);
    es_store(AT(word), value);
    Py_RETURN_NONE;
}

static PyObject *store_all(PyObject *self, PyObject *args) {
    PyObject *words;
    unsigned long long value;
    ARGS("O!K", &PyTuple_Type, &words, &value);
    for (Py_ssize_t i = 0; i < PyTuple_Size(words); i++) {
        unsigned long long word = PyLong_AsUnsignedLongLong(PyTuple_GetItem(words, i));
        if (PyErr_Occurred()) return NULL;
        es_store(AT(word), value);
    }
    Py_RETURN_NONE;
}

static PyObject *tree_reduce(PyObject *self, PyObject *args) {
    int dtype, op, rc;
    PyObject *addresses;
    const char *merges;
    Py_ssize_t num_merges, count;
    unsigned long long out;
    uint64_t inputs[ES_MAX_INPUTS];
    ARGS("iiOy#Kn", &dtype, &op, &addresses, &merges, &num_merges, &out, &count);
    Py_ssize_t num_inputs = es_parse_numbers(addresses, inputs, ES_MAX_INPUTS);
    if (num_inputs < 0) return NULL;
    if (num_inputs != num_merges) {
        PyErr_SetString(PyExc_ValueError, "tree_reduce needs one merge count for each of at most 256 inputs");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = es_tree_reduce(dtype, op, (const void *const *)inputs, (const uint8_t *)merges, (uint32_t)num_inputs, AT(out),
                        (size_t)count);
    Py_END_ALLOW_THREADS
    if (rc) {
        PyErr_SetString(PyExc_ValueError, "tree_reduce: unknown type or operation, or malformed merge program");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- messages ---- */

static PyObject *mail_bytes(PyObject *self, PyObject *args) {
    unsigned num_ranks;
    ARGS("I", &num_ranks);
    return PyLong_FromSize_t(es_mail_bytes(num_ranks));
}

static PyObject *mail_fragments(PyObject *self, PyObject *args) {
    unsigned long long bytes;
    ARGS("K", &bytes);
    return PyLong_FromUnsignedLongLong(es_mail_fragments(bytes));
}

static PyObject *mail_seen(PyObject *self, PyObject *args) {
    unsigned long long mail;
    unsigned rank;
    ARGS("KI", &mail, &rank);
    return PyLong_FromUnsignedLongLong(atomic_load(&es_mail_mark(AT(mail), rank)->seq));
}

static PyObject *mark_seen(PyObject *self, PyObject *args) {
    unsigned long long mark;
    ARGS("K", &mark);
    return PyLong_FromUnsignedLongLong(atomic_load(&((es_mark *)AT(mark))->seq));
}

static PyObject *mark_bump(PyObject *self, PyObject *args) {
    unsigned long long mark;
    ARGS("K", &mark);
    es_bump(AT(mark));
    Py_RETURN_NONE;
}

static PyObject *mark_wait(PyObject *self, PyObject *args) {
    unsigned long long mark, seen, base;
    unsigned spin;
    long long timeout_ns;
    int rc;
    ARGS("KKKIL", &mark, &seen, &base, &spin, &timeout_ns);
    Py_BEGIN_ALLOW_THREADS
    rc = es_await(AT(mark), seen + 1, base ? es_abort_word(AT(base)) : NULL, spin, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(rc);
}

static PyObject *pack_posts(PyObject *self, PyObject *args) {
    unsigned long long base, seq, out;
    PyObject *numbers;
    Py_ssize_t capacity;
    uint32_t workers[1024];
    size_t bytes;
    ARGS("KKO!Kn", &base, &seq, &PyTuple_Type, &numbers, &out, &capacity);
    Py_ssize_t count = PyTuple_Size(numbers);
    if (count > 1024) {
        PyErr_SetString(PyExc_ValueError, "a message has the posts of at most 1024 workers");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; ++i) workers[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(numbers, i));
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    bytes = es_pack_posts(AT(base), seq, workers, (uint32_t)count, AT(out), (size_t)capacity);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(bytes);
}

static PyObject *take_posts(PyObject *self, PyObject *args) {
    unsigned long long base, message;
    Py_ssize_t bytes;
    int rc;
    ARGS("KKn", &base, &message, &bytes);
    Py_BEGIN_ALLOW_THREADS
    rc = es_take_posts(AT(base), AT(message), (size_t)bytes);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(rc == 0);
}

static PyObject *mail_bump(PyObject *self, PyObject *args) {
    unsigned long long mail;
    unsigned rank;
    ARGS("KI", &mail, &rank);
    es_bump(es_mail_mark(AT(mail), rank));
    Py_RETURN_NONE;
}

static PyObject *mail_wait(PyObject *self, PyObject *args) {
    unsigned long long base, mail, seen;
    unsigned rank, spin;
    long long timeout_ns;
    int rc;
    ARGS("KKIKIL", &base, &mail, &rank, &seen, &spin, &timeout_ns);
    Py_BEGIN_ALLOW_THREADS
    rc = es_await(es_mail_mark(AT(mail), rank), seen + 1, es_abort_word(AT(base)), spin, timeout_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(rc);
}

static PyObject *mail_push(PyObject *self, PyObject *args) {
    unsigned long long mail, tag, bytes, dtype, number, data, fragments;
    unsigned num_ranks, from, to;
    ARGS("KIIIKKKKKK", &mail, &num_ranks, &from, &to, &tag, &bytes, &dtype, &number, &data, &fragments);
    es_message message = {tag, bytes, dtype, number};
    Py_BEGIN_ALLOW_THREADS
    fragments = es_mail_push(AT(mail), num_ranks, from, to, &message, AT(data), fragments);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(fragments);
}

static PyObject *mail_head(PyObject *self, PyObject *args) {
    unsigned long long mail;
    unsigned num_ranks, from, to;
    es_message found;
    ARGS("KIII", &mail, &num_ranks, &from, &to);
    if (!es_mail_head(AT(mail), num_ranks, from, to, &found)) Py_RETURN_NONE;
    return Py_BuildValue("(KKKK)", (unsigned long long)found.tag, (unsigned long long)found.bytes,
                         (unsigned long long)found.dtype, (unsigned long long)found.number);
}

static PyObject *mail_pull(PyObject *self, PyObject *args) {
    unsigned long long mail, bytes, data, fragments;
    unsigned num_ranks, from, to;
    ARGS("KIIIKKK", &mail, &num_ranks, &from, &to, &bytes, &data, &fragments);
    Py_BEGIN_ALLOW_THREADS
    fragments = es_mail_pull(AT(mail), num_ranks, from, to, bytes, AT(data), fragments);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(fragments);
}

static int address(PyObject *value, void *to) {
    *(void **)to = PyLong_AsVoidPtr(value);
    return !PyErr_Occurred();
}

/* Every pass takes the type, the shape and the number of threads, then what its formula in norm.h names. */
#define PASS "innnI"
#define COMMON(n) &n.type, &n.outer, &n.channels, &n.inner, &n.num_threads

static PyObject *norm_statistics(PyObject *self, PyObject *args) {
    es_norm n = {0};
    int rc;
    ARGS(PASS "O&O&", COMMON(n), address, &n.x, address, &n.out);
    Py_BEGIN_ALLOW_THREADS
    rc = es_norm_statistics(&n);
    Py_END_ALLOW_THREADS
    if (rc) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *norm_apply(PyObject *self, PyObject *args) {
    es_norm n = {0};
    ARGS(PASS "O&O&O&iO&iO&O&", COMMON(n), address, &n.x, address, &n.mean, address, &n.invstd, &n.weight.type, address,
         &n.weight.at, &n.bias.type, address, &n.bias.at, address, &n.out);
    Py_BEGIN_ALLOW_THREADS
    es_norm_apply(&n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm_reduce(PyObject *self, PyObject *args) {
    es_norm n = {0};
    int rc;
    ARGS(PASS "O&O&O&O&", COMMON(n), address, &n.dy, address, &n.x, address, &n.mean, address, &n.out);
    Py_BEGIN_ALLOW_THREADS
    rc = es_norm_reduce(&n);
    Py_END_ALLOW_THREADS
    if (rc) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *norm_backward(PyObject *self, PyObject *args) {
    es_norm n = {0};
    ARGS(PASS "O&O&O&O&iO&O&O&dO&", COMMON(n), address, &n.dy, address, &n.x, address, &n.mean, address, &n.invstd,
         &n.weight.type, address, &n.weight.at, address, &n.sum_dy, address, &n.sum_dy_xmu, &n.count, address, &n.out);
    Py_BEGIN_ALLOW_THREADS
    es_norm_backward(&n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm_move(PyObject *self, PyObject *args) {
    Py_ssize_t channels;
    const double *mean, *m2;
    double count, factor;
    es_vector to_mean, to_var;
    ARGS("nO&O&ddiO&iO&", &channels, address, &mean, address, &m2, &count, &factor, &to_mean.type, address, &to_mean.at,
         &to_var.type, address, &to_var.at);
    es_norm_move((size_t)channels, mean, m2, count, factor, to_mean, to_var);
    Py_RETURN_NONE;
}

static PyObject *norm_merge(PyObject *self, PyObject *args) {
    Py_ssize_t num_rows, channels;
    unsigned long long rows;
    ARGS("nnK", &num_rows, &channels, &rows);
    es_norm_merge((size_t)num_rows, (size_t)channels, AT(rows));
    Py_RETURN_NONE;
}

static PyObject *keep_memory(PyObject *self, PyObject *args) {
#ifdef __GLIBC__
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_TOP_PAD, 64 << 20);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"control_bytes", control_bytes, METH_VARARGS, NULL}, {"init", init, METH_VARARGS, NULL},
    {"describe", describe, METH_VARARGS, NULL},           {"post", post, METH_VARARGS, NULL},
    {"collect", collect, METH_VARARGS, NULL},             {"last_post", last_post, METH_VARARGS, NULL},
    {"abort_all", abort_all, METH_VARARGS, NULL},         {"aborted", aborted, METH_VARARGS, NULL},
    {"clear_abort", clear_abort, METH_VARARGS, NULL},
    {"set_pid", set_pid, METH_VARARGS, NULL},             {"pid", pid, METH_VARARGS, NULL},
    {"load", load, METH_VARARGS, NULL},                   {"store", store, METH_VARARGS, NULL},
    {"store_all", store_all, METH_VARARGS, NULL},
    {"tree_reduce", tree_reduce, METH_VARARGS, NULL},     {"mail_bytes", mail_bytes, METH_VARARGS, NULL},
    {"mail_fragments", mail_fragments, METH_VARARGS, NULL}, {"mail_seen", mail_seen, METH_VARARGS, NULL},
    {"mail_bump", mail_bump, METH_VARARGS, NULL},         {"mail_wait", mail_wait, METH_VARARGS, NULL},
    {"mark_seen", mark_seen, METH_VARARGS, NULL},         {"mark_bump", mark_bump, METH_VARARGS, NULL},
    {"mark_wait", mark_wait, METH_VARARGS, NULL},         {"follow", follow, METH_VARARGS, NULL},
    {"pack_posts", pack_posts, METH_VARARGS, NULL},       {"take_posts", take_posts, METH_VARARGS, NULL},
    {"mail_push", mail_push, METH_VARARGS, NULL},         {"mail_head", mail_head, METH_VARARGS, NULL},
    {"mail_pull", mail_pull, METH_VARARGS, NULL},
    {"die_with_parent", die_with_parent, METH_NOARGS, NULL},  {"copy", copy, METH_VARARGS, NULL},
    {"interrupt", interrupt, METH_VARARGS, NULL},
    {"checksum", checksum, METH_VARARGS, NULL},           {"gather", gather, METH_VARARGS, NULL},
    {"levels_are", levels_are, METH_VARARGS, NULL},       {"permutation", permutation, METH_VARARGS, NULL},
    {"norm_statistics", norm_statistics, METH_VARARGS, NULL}, {"norm_apply", norm_apply, METH_VARARGS, NULL},
    {"norm_reduce", norm_reduce, METH_VARARGS, NULL},     {"norm_backward", norm_backward, METH_VARARGS, NULL},
    {"norm_merge", norm_merge, METH_VARARGS, NULL},       {"norm_move", norm_move, METH_VARARGS, NULL},
    {"keep_memory", keep_memory, METH_NOARGS, NULL},      {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "evenstep.native.core", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_core(void) {
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) return NULL;
    if (es_add_team(m) || es_add_sums(m)) {
        Py_DECREF(m);
        return NULL;
    }
    PyModule_AddIntMacro(m, ES_OK);
    PyModule_AddIntMacro(m, ES_AGAIN);
    PyModule_AddIntMacro(m, ES_ABORTED);
    PyModule_AddIntMacro(m, ES_MISMATCH);
    PyModule_AddIntMacro(m, ES_GONE);
    PyModule_AddIntMacro(m, ES_SILENT);
    PyModule_AddIntMacro(m, ES_BARRIER);
    PyModule_AddIntMacro(m, ES_ALL_REDUCE);
    PyModule_AddIntMacro(m, ES_REDUCE);
    PyModule_AddIntMacro(m, ES_BROADCAST);
    PyModule_AddIntMacro(m, ES_ALL_GATHER);
    PyModule_AddIntMacro(m, ES_GATHER);
    PyModule_AddIntMacro(m, ES_SCATTER);
    PyModule_AddIntMacro(m, ES_REDUCE_SCATTER);
    PyModule_AddIntMacro(m, ES_TAG_BYTES);
    PyModule_AddIntMacro(m, ES_ERROR_BYTES);
    return m;
}
