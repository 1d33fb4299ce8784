/* A process that has another user of protobuf loads libtessera.so at run time. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char** argv) {
  unsigned (*version)(void);
  void* library;
  if (argc != 2) return 2;
  library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  *(void**)&version = dlsym(library, "tessera_abi_version");
  return version == NULL || version() != 2;
}
