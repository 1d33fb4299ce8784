# Everything comes from distribution packages (Debian 12, Ubuntu 24.04); nothing is downloaded.
# deploy/packages.txt names the packages; a miss here says so.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

macro(tessera_require package)
  find_package(${package} ${ARGN})
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR
      "${package} was not found. deploy/install-packages installs what the build needs.")
  endif()
endmacro()

tessera_require(Protobuf)
tessera_require(gRPC CONFIG)
tessera_require(absl CONFIG)
tessera_require(OpenSSL)
tessera_require(ZLIB)
tessera_require(prometheus-cpp CONFIG)
tessera_require(spdlog CONFIG)
tessera_require(Eigen3 CONFIG)
# Used as a header alone; its package has no CMake file.
find_path(TESSERA_XXHASH_INCLUDE xxhash.h)
if(NOT TESSERA_XXHASH_INCLUDE)
  message(FATAL_ERROR
    "xxhash.h was not found. deploy/install-packages installs what the build needs.")
endif()
# Neither have theirs.
find_path(TESSERA_ZMQ_INCLUDE zmq.h)
find_library(TESSERA_ZMQ_LIBRARY zmq)
find_path(TESSERA_MSGPACK_INCLUDE msgpack.hpp)
if(NOT TESSERA_ZMQ_INCLUDE OR NOT TESSERA_ZMQ_LIBRARY OR NOT TESSERA_MSGPACK_INCLUDE)
  message(FATAL_ERROR
    "ZeroMQ or msgpack was not found. deploy/install-packages installs what the build needs.")
endif()
find_path(TESSERA_SECCOMP_INCLUDE seccomp.h)
find_library(TESSERA_SECCOMP_LIBRARY seccomp)
if(NOT TESSERA_SECCOMP_INCLUDE OR NOT TESSERA_SECCOMP_LIBRARY)
  message(FATAL_ERROR
    "libseccomp was not found. deploy/install-packages installs what the build needs.")
endif()
if(TESSERA_TESTS)
  tessera_require(GTest)
endif()

find_program(TESSERA_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)
