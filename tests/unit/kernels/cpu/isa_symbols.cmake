# Fails if a file compiled with ISA flags defines a function that the linker may share with baseline
# code (a weak symbol), or any function other than its two entry points. An inline function of a
# shared header, compiled here with AVX-512, would otherwise run on machines without it.
#   cmake -DNM=... -DOBJECTS=a.o;b.o -P isa_symbols.cmake
list(LENGTH OBJECTS objects)
if(NOT objects EQUAL 2)
  message(FATAL_ERROR "expected the AVX2 and the AVX-512 object, got '${OBJECTS}'")
endif()
foreach(object ${OBJECTS})
  execute_process(COMMAND ${NM} --defined-only -C ${object}
    OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} could not read ${object}")
  endif()
  string(REPLACE ";" "," symbols "${symbols}")
  string(REPLACE "\n" ";" symbols "${symbols}")
  set(entries 0)
  foreach(symbol ${symbols})
    if(symbol MATCHES "^[0-9a-f]+ [WVu] (.*)$")
      # Sanitizers and -O0 builds may emit weak data of their own; functions are what is dangerous.
      if(NOT CMAKE_MATCH_1 MATCHES "^(__odr_asan|DW\\.ref|__asan|__ubsan|typeinfo|__clang_call_terminate)")
        message(SEND_ERROR "${object}: weak symbol ${CMAKE_MATCH_1}")
      endif()
    elseif(symbol MATCHES "^[0-9a-f]+ T (.*)$")
      math(EXPR entries "${entries} + 1")
      if(NOT CMAKE_MATCH_1 MATCHES "tessera::kernels::(AttendPart|FirstUnusable)Avx(2|512)\\(")
        message(SEND_ERROR "${object}: exports ${CMAKE_MATCH_1}")
      endif()
    endif()
  endforeach()
  if(NOT entries EQUAL 2)
    message(SEND_ERROR "${object}: ${entries} entry points, expected 2")
  endif()
endforeach()
