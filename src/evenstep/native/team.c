#include "team.h"

#include <pthread.h>
#include <string.h>
#include <structmember.h>

/* How often this process was forked. A copy must not go on in place of the process it was forked from, and asking for the
 * process id would take as long as a small operation. */
static unsigned num_forks;

static void count_fork(void) { num_forks += 1; }

/* ---- the turn: one operation of a group at a time ---- */

static PyObject *make_turn(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    es_turn_object *self = (es_turn_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->num_forks = num_forks;
    self->lock = PyThread_allocate_lock();
    if (self->lock) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void free_turn(PyObject *object) {
    es_turn_object *self = (es_turn_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->lock) PyThread_free_lock(self->lock);
    PyObject_Free(object);
    Py_DECREF((PyObject *)type);
}

int es_take_turn(es_turn_object *self) {
    return self->num_forks == num_forks && !self->num_open && PyThread_acquire_lock(self->lock, NOWAIT_LOCK);
}

void es_leave_turn(es_turn_object *self) { PyThread_release_lock(self->lock); }

static PyObject *turn_take(PyObject *self, PyObject *unused) { return PyBool_FromLong(es_take_turn((es_turn_object *)self)); }

static PyObject *turn_wait(PyObject *self, PyObject *unused) {
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(((es_turn_object *)self)->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *turn_leave(PyObject *self, PyObject *unused) {
    es_leave_turn((es_turn_object *)self);
    Py_RETURN_NONE;
}

static PyObject *turn_opened(PyObject *self, PyObject *unused) {
    ((es_turn_object *)self)->num_open += 1;
    Py_RETURN_NONE;
}

static PyObject *turn_over(PyObject *self, PyObject *unused) {
    ((es_turn_object *)self)->num_open -= 1;
    Py_RETURN_NONE;
}

static PyMethodDef turn_methods[] = {
    {"take", turn_take, METH_NOARGS, NULL},     {"wait", turn_wait, METH_NOARGS, NULL},
    {"leave", turn_leave, METH_NOARGS, NULL},   {"opened", turn_opened, METH_NOARGS, NULL},
    {"over", turn_over, METH_NOARGS, NULL},     {NULL, NULL, 0, NULL},
};
static PyType_Slot turn_slots[] = {
    {Py_tp_new, make_turn}, {Py_tp_dealloc, free_turn}, {Py_tp_methods, turn_methods}, {0, NULL}};
static PyType_Spec turn_spec = {"evenstep.native.core.Turn", sizeof(es_turn_object), 0, Py_TPFLAGS_DEFAULT, turn_slots};

/* ---- the team ---- */

static int look_around(void *context, uint32_t rank) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *found = PyObject_CallFunction(context, "I", rank);
    int answer = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    PyGILState_Release(state);
    return answer;
}

static PyObject *make_team(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long base, rings;
    unsigned rank;
    Py_ssize_t at_once_bytes, num_ranks, ring_bytes;
    const char *merges;
    PyObject *look;
    if (!PyArg_ParseTuple(args, "KIy#nKnO", &base, &rank, &merges, &num_ranks, &at_once_bytes, &rings, &ring_bytes, &look))
        return NULL;
    if (num_ranks < 1 || num_ranks > ES_MAX_INPUTS || rank >= (unsigned)num_ranks)
        return PyErr_Format(PyExc_ValueError, "rank %u of %zd: expected one of at most %d", rank, num_ranks, ES_MAX_INPUTS);
    es_team_object *self = (es_team_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->team = (es_team){
        .base = AT(base),
        .rank = rank,
        .num_ranks = (uint32_t)num_ranks,
        .at_once_bytes = (size_t)at_once_bytes,
        .rings = AT(rings),
        .ring_bytes = (size_t)ring_bytes,
        .look = look_around,
        .context = Py_NewRef(look),
    };
    memcpy(self->team.merges, merges, (size_t)num_ranks);
    return (PyObject *)self;
}

static void free_team(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF((PyObject *)((es_team_object *)object)->team.context);
    PyObject_Free(object);
    Py_DECREF((PyObject *)type);
}

/* From now on it has no memory; using it raises an exception. */
static PyObject *close_team(PyObject *self, PyObject *unused) {
    es_team *team = &((es_team_object *)self)->team;
    PyObject *look = team->context;
    team->base = team->context = NULL;
    Py_XDECREF(look);
    Py_RETURN_NONE;
}

Py_ssize_t es_parse_numbers(PyObject *tuple, uint64_t *out, Py_ssize_t most) {
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (count < 0 || count > most) {
        PyErr_Format(PyExc_ValueError, "expected a tuple of at most %zd numbers", most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) out[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : count;
}

/* Addresses come as one number, as a tuple with one for each rank, or as None. Returns 0 with an exception set. */
static int parse_pieces(PyObject *pieces, uint64_t *into, uint64_t **found) {
    *found = pieces == Py_None ? NULL : into;
    if (pieces == Py_None) return 1;
    if (PyTuple_Check(pieces)) return es_parse_numbers(pieces, into, ES_MAX_INPUTS) >= 0;
    into[0] = PyLong_AsUnsignedLongLong(pieces);
    return !PyErr_Occurred();
}

int es_take_part(es_team_object *self, es_call *call) {
    int rc;
    if (!self->team.base) {
        PyErr_SetString(PyExc_ValueError, "the team is closed");
        return ES_INTERRUPTED;
    }
    call->number = ++self->number;
    call->looks = self->looks;
    call->spin = self->spin;
    call->step_bytes = (size_t)self->step_bytes;
    Py_BEGIN_ALLOW_THREADS
    rc = es_collective(&self->team, call);
    Py_END_ALLOW_THREADS
    return rc;
}

static PyObject *finish_call(es_team_object *self, es_call *call) {
    int rc = es_take_part(self, call);
    if (rc == ES_INTERRUPTED) return NULL;
    return PyLong_FromLong(rc == ES_OK ? ES_OK : rc | (long)self->team.culprit << 8);
}

/* collective(kind, tag, dtype, op, root, count, ins, outs, timeout_ns) */
static PyObject *collective(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    uint64_t in[ES_MAX_INPUTS], out[ES_MAX_INPUTS], *ins, *outs;
    if (num_args != 9) return PyErr_Format(PyExc_TypeError, "collective takes 9 arguments");
    if (!parse_pieces(args[6], in, &ins) || !parse_pieces(args[7], out, &outs)) return NULL;
    es_call call = {
        .kind = (int)PyLong_AsLong(args[0]),
        .tag = PyBytes_AsString(args[1]),
        .dtype = (int)PyLong_AsLong(args[2]),
        .op = (int)PyLong_AsLong(args[3]),
        .root = (uint32_t)PyLong_AsUnsignedLong(args[4]),
        .count = PyLong_AsSize_t(args[5]),
        .timeout_ns = PyLong_AsLongLong(args[8]),
        .in = (const void *const *)ins,
        .out = (void *const *)outs,
    };
    if (PyErr_Occurred()) return NULL;
    call.tag_hash = es_hash_tag(call.tag);
    return finish_call((es_team_object *)self, &call);
}

static PyObject *all_to_all(PyObject *self, PyObject *args) {
    PyObject *pieces[4];
    uint64_t found[4][ES_MAX_INPUTS]; /* ins, their bytes, outs, their bytes */
    es_call call = {.kind = ES_ALL_TO_ALL, .dtype = ES_U8};
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "yOOOOL", &call.tag, &pieces[0], &pieces[1], &pieces[2], &pieces[3], &timeout_ns)) return NULL;
    for (int i = 0; i < 4; ++i) {
        Py_ssize_t num_found = es_parse_numbers(pieces[i], found[i], ES_MAX_INPUTS);
        if (num_found >= 0 && num_found != ((es_team_object *)self)->team.num_ranks)
            PyErr_SetString(PyExc_ValueError, "all_to_all needs one piece for each rank");
        if (PyErr_Occurred()) return NULL;
    }
    call.tag_hash = es_hash_tag(call.tag);
    call.timeout_ns = timeout_ns;
    call.in = (const void *const *)found[0];
    call.in_items = found[1];
    call.out = (void *const *)found[2];
    call.out_items = found[3];
    return finish_call((es_team_object *)self, &call);
}

static PyMethodDef team_methods[] = {
    {"collective", (PyCFunction)(void (*)(void))collective, METH_FASTCALL, NULL},
    {"all_to_all", all_to_all, METH_VARARGS, NULL},
    {"close", close_team, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef team_members[] = {
    {"number", T_ULONGLONG, offsetof(es_team_object, number), 0, NULL},
    {"looks", T_UINT, offsetof(es_team_object, looks), 0, NULL},
    {"spin", T_UINT, offsetof(es_team_object, spin), 0, NULL},
    {"step_bytes", T_PYSSIZET, offsetof(es_team_object, step_bytes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot team_slots[] = {{Py_tp_new, make_team},         {Py_tp_dealloc, free_team},
                                   {Py_tp_methods, team_methods},  {Py_tp_members, team_members},
                                   {0, NULL}};
static PyType_Spec team_spec = {"evenstep.native.core.Team", sizeof(es_team_object), 0, Py_TPFLAGS_DEFAULT, team_slots};

int es_add_team(PyObject *module) {
    if (pthread_atfork(NULL, NULL, count_fork)) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *turn = PyType_FromSpec(&turn_spec), *team = PyType_FromSpec(&team_spec);
    int rc = turn && team ? PyModule_AddObjectRef(module, "Turn", turn) | PyModule_AddObjectRef(module, "Team", team) : -1;
    Py_XDECREF(turn);
    Py_XDECREF(team);
    return rc;
}
