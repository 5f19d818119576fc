/* Sums that the caller waits for: from torch's arguments to the result in one call.
 *
 * For a small sum, checking its arguments takes longer than the sum itself. So sums that were done before are known by
 * the dtype and shape of the tensor, and anything unusual, such as a user's own type of tensor, is left to the
 * general path.
 */
#include "team.h"

#include <string.h>
#include <structmember.h>

#include "view.h"

enum { MOST_KNOWN = 4096 }; /* sizes may never repeat */

static const char KNOWN[] = "evenstep.native.known";

typedef struct {
    es_call call;
    char tag[];
} known_sum;

typedef struct {
    PyObject_HEAD
    es_team_object *team;
    es_turn_object *turn;
    PyObject *known;        /* es_view_key: known_sum, in a capsule */
    PyObject *types;        /* of tensors that can be looked at; the first one has the viewer */
    es_viewer viewer;
    PyObject *is_recording; /* whether a profiler is recording */
    PyObject *usual;        /* what AllreduceOptions have for a sum: (reduceOp, timeout) */
    PyObject *done;         /* what is returned */
    PyObject *failed;       /* called with (code, culprit, tag, timeout_s), or (code, error, tag, timeout_s); raises */
    double timeout_s;
} sums_object;

static PyObject *name_async, *name_op, *name_timeout;

static PyObject *make_sums(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *team, *turn, *is_recording, *usual, *types, *done, *failed, *module = PyType_GetModule(type);
    PyObject *team_type = module ? PyObject_GetAttrString(module, "Team") : NULL;
    PyObject *turn_type = module ? PyObject_GetAttrString(module, "Turn") : NULL;
    sums_object *self = NULL;
    if (team_type && turn_type &&
        PyArg_ParseTuple(args, "O!O!OO!O!OO", team_type, &team, turn_type, &turn, &is_recording, &PyTuple_Type, &usual,
                         &PyTuple_Type, &types, &done, &failed))
        self = (sums_object *)PyType_GenericAlloc(type, 0);
    Py_XDECREF(team_type);
    Py_XDECREF(turn_type);
    if (!self) return NULL;
    self->team = (es_team_object *)Py_NewRef(team);
    self->turn = (es_turn_object *)Py_NewRef(turn);
    self->is_recording = Py_NewRef(is_recording);
    self->usual = Py_NewRef(usual);
    self->types = Py_NewRef(types);
    self->viewer = es_find_viewer(PyTuple_GetItem(types, 0));
    self->done = Py_NewRef(done);
    self->failed = Py_NewRef(failed);
    self->known = PyDict_New();
    if (!self->known) Py_CLEAR(self);
    return (PyObject *)self;
}

static void free_sums(PyObject *object) {
    sums_object *self = (sums_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF((PyObject *)self->team);
    Py_XDECREF((PyObject *)self->turn);
    Py_XDECREF(self->known);
    Py_XDECREF(self->is_recording);
    Py_XDECREF(self->usual);
    Py_XDECREF(self->types);
    Py_XDECREF(self->done);
    Py_XDECREF(self->failed);
    PyObject_Free(object);
    Py_DECREF((PyObject *)type);
}

static void forget(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, KNOWN)); }

/* Whether the memory of a tensor can be added as it is, and where it is. */
static int look_at(const sums_object *self, PyObject *tensor, es_view *view) {
    for (Py_ssize_t i = PyTuple_Size(self->types); self->viewer && i-- > 0;)
        if ((PyObject *)Py_TYPE(tensor) == PyTuple_GetItem(self->types, i)) return es_look_at(self->viewer, tensor, view);
    return 0;
}

/* learn(tensor, tag, dtype in the core, operation, number of items) */
static PyObject *learn(PyObject *object, PyObject *args) {
    sums_object *self = (sums_object *)object;
    PyObject *tensor;
    es_view view;
    const char *tag;
    int code, op;
    Py_ssize_t tag_bytes, count;
    if (!PyArg_ParseTuple(args, "Oy#iin", &tensor, &tag, &tag_bytes, &code, &op, &count)) return NULL;
    if (!look_at(self, tensor, &view)) Py_RETURN_NONE;
    known_sum *sum = PyMem_Calloc(1, sizeof *sum + (size_t)tag_bytes + 1);
    if (!sum) return PyErr_NoMemory();
    memcpy(sum->tag, tag, (size_t)tag_bytes);
    sum->call = (es_call){.kind = ES_ALL_REDUCE, .tag = sum->tag, .tag_hash = es_hash_tag(sum->tag), .dtype = code,
                          .op = op, .count = (size_t)count};
    PyObject *capsule = PyCapsule_New(sum, KNOWN, forget);
    if (!capsule) {
        PyMem_Free(sum);
        return NULL;
    }
    if (PyDict_Size(self->known) >= MOST_KNOWN) PyDict_Clear(self->known);
    PyObject *key = es_view_key(&view);
    int rc = key ? PyDict_SetItem(self->known, key, capsule) : -1;
    Py_XDECREF(key);
    Py_DECREF(capsule);
    if (rc) return NULL;
    Py_RETURN_NONE;
}

/* Whether an attribute is this very object; -1 with an exception set. */
static int is(PyObject *object, PyObject *name, PyObject *expected) {
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found ? found == expected : -1;
}

static int equals(PyObject *object, PyObject *name, PyObject *expected) {
    PyObject *found = PyObject_GetAttr(object, name);
    int answer = found ? PyObject_RichCompareBool(found, expected, Py_EQ) : -1;
    Py_XDECREF(found);
    return answer;
}

/* Whether the options are those of a sum that the caller waits for, without a profiler; -1 with an exception set. */
static int is_usual(const sums_object *self, PyObject *opts) {
    if (opts == Py_None) return 0;
    int answer = is(opts, name_async, Py_False);
    if (answer > 0) answer = equals(opts, name_op, PyTuple_GetItem(self->usual, 0));
    if (answer > 0) answer = equals(opts, name_timeout, PyTuple_GetItem(self->usual, 1));
    if (answer <= 0) return answer;
    PyObject *recording = PyObject_CallNoArgs(self->is_recording);
    Py_XDECREF(recording);
    return recording ? recording == Py_False : -1;
}

/* What is known of the sum of such tensors; NULL with or without an exception set. */
static PyObject *find(const sums_object *self, const es_view *view) {
    PyObject *key = es_view_key(view);
    PyObject *capsule = key ? PyDict_GetItemWithError(self->known, key) : NULL;
    Py_XINCREF(capsule);
    Py_XDECREF(key);
    return capsule;
}

static PyObject *fail(sums_object *self, int rc, const char *tag) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL, *found;
    if (rc == ES_INTERRUPTED) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        found = PyObject_CallFunction(self->failed, "iOyd", rc, error, tag, self->timeout_s);
    } else {
        found = PyObject_CallFunction(self->failed, "iIyd", rc, self->team->team.culprit, tag, self->timeout_s);
    }
    Py_XDECREF(found);
    if (type && found) PyErr_Restore(type, error, traceback);
    else Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(traceback);
    return NULL;
}

/* Adds memory, if nothing else is in the way. */
static PyObject *add(sums_object *self, void *memory, const known_sum *sum) {
    if (!self->team->team.base || !es_take_turn(self->turn)) Py_RETURN_NONE;
    es_call call = sum->call;
    call.timeout_ns = (int64_t)((self->timeout_s < 1e9 ? self->timeout_s : 1e9) * 1e9);
    call.in = (const void *const *)&memory;
    call.out = &memory;
    int rc = es_take_part(self->team, &call);
    es_leave_turn(self->turn);
    return rc == ES_OK ? Py_NewRef(self->done) : fail(self, rc, sum->tag);
}

/* all_reduce(tensors, opts): `done` if it was done, None if the general path has to do it. */
static PyObject *all_reduce(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    sums_object *self = (sums_object *)object;
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "all_reduce takes 2 arguments");
    if (!PyList_CheckExact(args[0]) || PyList_Size(args[0]) != 1) Py_RETURN_NONE;
    PyObject *tensor = Py_NewRef(PyList_GetItem(args[0], 0)); /* others may run meanwhile, and change the list */
    es_view view;
    PyObject *known = look_at(self, tensor, &view) && is_usual(self, args[1]) > 0 ? find(self, &view) : NULL;
    PyObject *result = known ? add(self, view.data, PyCapsule_GetPointer(known, KNOWN)) : NULL;
    Py_DECREF(tensor);
    if (!known && !PyErr_Occurred()) Py_RETURN_NONE;
    Py_XDECREF(known);
    return result;
}

static PyMethodDef sums_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))all_reduce, METH_FASTCALL, NULL},
    {"learn", learn, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef sums_members[] = {
    {"timeout_s", T_DOUBLE, offsetof(sums_object, timeout_s), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot sums_slots[] = {{Py_tp_new, make_sums},        {Py_tp_dealloc, free_sums},
                                   {Py_tp_methods, sums_methods}, {Py_tp_members, sums_members},
                                   {0, NULL}};
static PyType_Spec sums_spec = {"evenstep.native.core.Sums", sizeof(sums_object), 0, Py_TPFLAGS_DEFAULT, sums_slots};

int es_add_sums(PyObject *module) {
    static const struct {
        PyObject **name;
        const char *text;
    } NAMES[] = {{&name_async, "asyncOp"}, {&name_op, "reduceOp"}, {&name_timeout, "timeout"}};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; ++i)
        if (!(*NAMES[i].name = PyUnicode_InternFromString(NAMES[i].text))) return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &sums_spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, "Sums", type) : -1;
    Py_XDECREF(type);
    return rc;
}
