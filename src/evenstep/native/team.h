/* Teams as Python objects, and the turn to use one. */
#ifndef EVENSTEP_TEAM_H
#define EVENSTEP_TEAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "collective.h"

#define AT(address) ((void *)(uintptr_t)(address))

/* One operation of a group at a time. */
typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock; /* held while an operation is done */
    Py_ssize_t num_open;     /* operations that wait for the turn or have it, of those that are counted */
    unsigned num_forks;      /* the forks of this process when it was made */
} es_turn_object;

typedef struct {
    PyObject_HEAD
    es_team team;
    unsigned long long number; /* of the operation that was started last */
    unsigned looks, spin;      /* see es_call */
    Py_ssize_t step_bytes;
} es_team_object;

/* Takes the turn if no operation is open, and this process is not the copy of the one that made it. */
int es_take_turn(es_turn_object *self);
void es_leave_turn(es_turn_object *self);
/* As es_collective, for a caller that has the turn; ES_INTERRUPTED with an exception set. */
int es_take_part(es_team_object *self, es_call *call);
/* Reads the numbers of a tuple of at most `most`: how many there are, or -1 with an exception set. */
Py_ssize_t es_parse_numbers(PyObject *tuple, uint64_t *out, Py_ssize_t most);

/* They add their types to the module; -1 with an exception set if that fails. */
int es_add_team(PyObject *module);
int es_add_sums(PyObject *module); /* sums.c */

#endif
