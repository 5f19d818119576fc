/* A tensor's memory, read by the C interface that torch shares with other libraries (DLPack, version 1): one call instead
 * of an attribute for each of address, shape, strides, type and device. */
#ifndef EVENSTEP_VIEW_H
#define EVENSTEP_VIEW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { ES_MOST_DIMS = 8 };

/* The layout is DLPack's DLTensor. */
typedef struct {
    void *data;
    struct {
        int32_t kind, number;
    } device;
    int32_t num_dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} es_view;

typedef int (*es_viewer)(void *object, es_view *out);

/* The function that looks at tensors of this type, or NULL without an exception if the type does not offer it. */
es_viewer es_find_viewer(PyObject *type);
/* Looks at a tensor of such a type. Whether it lies in the memory of the CPU as it is written, row by row, with at least
 * one item and at most ES_MOST_DIMS dimensions; never sets an exception. */
int es_look_at(es_viewer viewer, PyObject *tensor, es_view *out);
/* The dtype and the shape as bytes, equal for equal ones. */
PyObject *es_view_key(const es_view *view);

#endif
