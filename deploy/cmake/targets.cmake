# The shapes that folders use.

# tessera_pch(NAME HEADERS... [LINK libs...] [EXECUTABLES]): headers of packages, compiled once for
# all targets of a folder and those below it, which name it in TESSERA_PCH. They are libraries or
# executables, with the optimisation of the folder that calls this. Every file still includes what
# it uses: builds with a sanitizer go without.
function(tessera_pch name)
  cmake_parse_arguments(ARG "EXECUTABLES" "" "HEADERS;LINK" ${ARGN})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "int main() {}\n")
  if(ARG_EXECUTABLES)
    add_executable(${name} ${source})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
  else()
    add_library(${name} STATIC ${source})
  endif()
  target_link_libraries(${name} PRIVATE tessera_warnings ${ARG_LINK})
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
endfunction()

# What nearly every file includes.
set(TESSERA_COMMON_HEADERS
  <algorithm> <cstdint> <functional> <memory> <optional> <span> <string> <string_view> <utility>
  <vector> <absl/status/status.h> <absl/status/statusor.h>)

function(tessera_use_pch name)
  if(TESSERA_PCH AND NOT TESSERA_SANITIZE AND NOT TESSERA_CCACHE)
    target_precompile_headers(${name} REUSE_FROM ${TESSERA_PCH})
  endif()
endfunction()

# Half of a file's compile time goes to headers and templates that its neighbours need too: five
# files at a time are compiled as one. Builds with a sanitizer go without, so that every file is
# seen to include what it uses.
function(tessera_compile_together name)
  if(NOT TESSERA_SANITIZE)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 5)
  endif()
endfunction()

# tessera_library(NAME [TOGETHER] SOURCES... LINK libs...): one folder, one library. TOGETHER
# compiles several files as one. The link list is the folder's place in the layers;
# tests/unit/layers_test checks that the includes say the same.
function(tessera_library name)
  cmake_parse_arguments(ARG "TOGETHER" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  if(ARG_SOURCES)
    add_library(${name} STATIC ${ARG_SOURCES})
    target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} PUBLIC ${ARG_LINK} PRIVATE tessera_warnings ${ARG_PRIVATE_LINK})
    tessera_use_pch(${name})
    if(ARG_TOGETHER)
      tessera_compile_together(${name})
    endif()
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} INTERFACE ${ARG_LINK})
  endif()
endfunction()

# tessera_test(NAME [ONE_THREAD] SOURCES... LINK libs... [LABELS ...] [TIMEOUT s] [COST s]
# [THREADED filter]): one GoogleTest binary. COST is about how long it takes: what takes long starts
# first. It writes its cases to test-results/NAME.xml, where
# tests/run counts them. Cases without threads would keep ThreadSanitizer busy for an hour with
# nothing to find: its build goes without ONE_THREAD's binaries, and of others it runs those cases
# alone that THREADED names.
function(tessera_test name)
  cmake_parse_arguments(ARG "ONE_THREAD" "TIMEOUT;COST;THREADED" "SOURCES;LINK;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  tessera_compile_together(${name})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} tessera_warnings GTest::gtest GTest::gtest_main)
  tessera_use_pch(${name})
  if(ARG_ONE_THREAD AND TESSERA_SANITIZE MATCHES "thread")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  if(NOT "e2e" IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY TESSERA_QUICK_TESTS ${name})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(TESSERA_SANITIZE)  # instrumented code is several times slower
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  endif()
  set(cases)
  if(ARG_THREADED AND TESSERA_SANITIZE MATCHES "thread")
    set(cases --gtest_filter=${ARG_THREADED})
  endif()
  add_test(NAME ${name}
    COMMAND ${name} --gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml ${cases})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  if(ARG_COST)
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
  if(ARG_LABELS)
    set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}")
  endif()
endfunction()

# tessera_ops_test(NAME SCRIPT [ARGUMENTS ...] [TIMEOUT s] [ALONE]): a script that tests operations
# with real tools. It exits with 77 where a tool cannot be had. A Python script uses
# tests/ops/cases.py, so that tests/run counts each of its cases; any other script is executed and
# counts as one. ALONE: no other test runs meanwhile, for what boots a whole system.
function(tessera_ops_test name script)
  cmake_parse_arguments(ARG "ALONE" "TIMEOUT" "ARGUMENTS" ${ARGN})
  if(TESSERA_SANITIZE)  # they test the product from outside, with tools that are no part of it
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  set(command ${script} ${ARG_ARGUMENTS})
  if(script MATCHES "[.]py$")
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    list(PREPEND command ${Python3_EXECUTABLE})
    list(APPEND command --gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml)
  endif()
  add_test(NAME ${name} COMMAND ${command})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE 77 LABELS ops)
  if(ARG_ALONE)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
