# Compilers, warnings, sanitizers, ccache, and the optional CUDA language. All variables belong to
# this project's scope: a project that adds this one with add_subdirectory keeps its own.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

if(NOT CMAKE_BUILD_TYPE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# -O3 is for folders that compute, which ask for it; elsewhere it only takes longer to compile.
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

# Goes without precompiled headers: ccache hands out old ones after a change of what they include.
option(TESSERA_CCACHE "Compile through ccache" OFF)
if(TESSERA_CCACHE)
  find_program(TESSERA_CCACHE_PROGRAM ccache REQUIRED)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE_PROGRAM})
  set(CMAKE_C_COMPILER_LAUNCHER ${TESSERA_CCACHE_PROGRAM})
endif()

# Warnings for our own code only; generated code and system headers are not ours to fix.
add_library(tessera_warnings INTERFACE)
target_compile_options(tessera_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wundef -Wno-missing-field-initializers>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(tessera_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wshadow=local>)
endif()
if(TESSERA_WERROR)
  target_compile_options(tessera_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 reports overlaps inside std::string that cannot happen (GCC bug 105651).
  target_compile_options(tessera_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(tessera_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety>)
endif()

if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC's flow analysis does not see through the instrumentation (its manual says so).
    target_compile_options(tessera_warnings INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  endif()
  if(TESSERA_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()

set(TESSERA_HAVE_CUDA OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES ${TESSERA_CUDA_ARCHITECTURES})
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.8)
    if(CUDAToolkit_FOUND)
      set(TESSERA_HAVE_CUDA ON)
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it yet
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    endif()
  endif()
  if(TESSERA_CUDA STREQUAL "ON" AND NOT TESSERA_HAVE_CUDA)
    message(FATAL_ERROR "TESSERA_CUDA=ON, but no CUDA toolkit 12.8 or newer was found")
  endif()
endif()
if(TESSERA_HAVE_CUDA)
  message(STATUS "CUDA device: built for architectures ${TESSERA_CUDA_ARCHITECTURES}")
else()
  message(STATUS
    "CUDA device: not built (TESSERA_CUDA=${TESSERA_CUDA}, no toolkit found or asked for)")
endif()
