/* Makes a loaded library call our functions where it calls others by name.
 *
 * A shared library calls replaceable functions through a table of addresses, and replacing an address there reaches
 * every caller in the library, whichever operation it is part of. Nothing changes on disk or in other libraries.
 */
#ifndef EVENSTEP_REDIRECT_H
#define EVENSTEP_REDIRECT_H

/* Redirects the calls of the loaded library whose file name is `library` (such as "libtorch_cpu.so"), always the same one,
 * which stays loaded. `missed` is called for each of our functions whose name the library never calls. Call it from one
 * thread, and not twice without es_restore in between.
 * 0: done. -1: no such library is loaded. -2: its table could not be written (errno says why); nothing is redirected. */
int es_redirect(const char *library, void (*missed)(const char *name, void *context), void *context);

/* Undoes it; call it once for each es_redirect. */
void es_restore(void);

#endif
