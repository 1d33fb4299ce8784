# What makes a mistake in our code harder to exploit. tests/security/elf_test.py reads the result.
# To be included after the kernels, which check their bounds once per tile and not per access.

include(CheckCXXCompilerFlag)
include(CheckPIESupported)
check_pie_supported()

if(TESSERA_SANITIZE)
  return()  # sanitizers find more, and instrument the same places
endif()

set(hardening -fstack-protector-strong -fstack-clash-protection)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND hardening -fcf-protection=full)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${hardening}>")
add_compile_definitions($<$<COMPILE_LANGUAGE:CXX>:_GLIBCXX_ASSERTIONS>)

# Level 3 also knows sizes that are not constants. It needs optimisation, and some distributions
# define a level of their own.
check_cxx_compiler_flag("-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3" TESSERA_FORTIFIES_3)
set(level 2)
if(TESSERA_FORTIFIES_3)
  set(level 3)
endif()
set(fortify -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=${level})
set(optimised $<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<CONFIG:Debug>>>)
add_compile_options("$<${optimised}:${fortify}>")

# All addresses are resolved at start, and their tables are read-only from then on.
add_link_options(LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack)
