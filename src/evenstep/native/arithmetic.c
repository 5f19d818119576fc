/* The arithmetic that does not depend on the processor, as a Python module; addresses are plain integers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "caches.h"
#include "product.h"
#include "redirect.h"

#define AT(address) ((void *)(uintptr_t)(address))

static PyObject *bits(PyObject *self, PyObject *unused) { return PyLong_FromLong(es_product_bits()); }

static PyObject *limit_bits(PyObject *self, PyObject *args) {
    int most;
    if (!PyArg_ParseTuple(args, "i", &most)) return NULL;
    es_limit_product_bits(most);
    Py_RETURN_NONE;
}

static PyObject *product(PyObject *self, PyObject *args) {
    int wide;
    Py_ssize_t m, n, k, strides[6];
    unsigned long long a, b, c;
    double alpha, beta;
    if (!PyArg_ParseTuple(args, "pnnndKnnKnndKnn", &wide, &m, &n, &k, &alpha, &a, strides, strides + 1, &b,
                          strides + 2, strides + 3, &beta, &c, strides + 4, strides + 5))
        return NULL;
    if (strides[4] != 1 && strides[5] != 1) {
        PyErr_SetString(PyExc_ValueError, "one stride of the result must be 1");
        return NULL;
    }
    es_matrix left = {AT(a), strides[0], strides[1]}, right = {AT(b), strides[2], strides[3]},
              into = {AT(c), strides[4], strides[5]};
    Py_BEGIN_ALLOW_THREADS
    if (wide)
        es_product_f64(m, n, k, alpha, left, right, beta, into);
    else
        es_product_f32(m, n, k, (float)alpha, left, right, (float)beta, into);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void note(const char *name, void *list) {
    PyObject *text = PyUnicode_FromString(name);
    if (text) PyList_Append(list, text);
    Py_XDECREF(text);
}

static PyObject *redirect(PyObject *self, PyObject *args) {
    const char *library;
    if (!PyArg_ParseTuple(args, "s", &library)) return NULL;
    PyObject *missed = PyList_New(0);
    if (!missed) return NULL;
    int rc = es_redirect(library, note, missed);
    if (rc == 0 && !PyErr_Occurred()) return missed;
    Py_DECREF(missed);
    if (rc == -1) return PyErr_Format(PyExc_LookupError, "%s is not loaded", library);
    return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *restore(PyObject *self, PyObject *unused) {
    es_restore();
    Py_RETURN_NONE;
}

static PyObject *pin_caches(PyObject *self, PyObject *args) {
    const char *library;
    if (!PyArg_ParseTuple(args, "s", &library)) return NULL;
    switch (es_pin_caches(library)) {
        case 0: break;
        case -1: return PyErr_Format(PyExc_LookupError, "%s is not loaded", library);
        case -2: return PyErr_SetFromErrno(PyExc_OSError);
        default: return PyErr_Format(PyExc_LookupError, "%s has no oneDNN whose caches could be pinned", library);
    }
    return Py_BuildValue("III", es_cache_bytes(1), es_cache_bytes(2), es_cache_bytes(3));
}

static PyMethodDef methods[] = {
    {"bits", bits, METH_NOARGS, NULL},
    {"limit_bits", limit_bits, METH_VARARGS, NULL},
    {"pin_caches", pin_caches, METH_VARARGS, NULL},
    {"product", product, METH_VARARGS, NULL},
    {"redirect", redirect, METH_VARARGS, NULL},
    {"restore", restore, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "evenstep.native.arithmetic", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_arithmetic(void) { return PyModule_Create(&module); }
