# The library as others link it: libtessera.so for C, and one archive with everything for C++.

# Archives of this tree that the client library consists of.
set(archives
  tessera_kernels_dispatch tessera_kernels_reference tessera_kernels_cpu tessera_kernels_cuda
  tessera_kernels_cuda_host tessera_shm tessera_proto tessera_base tessera_platform)
set(archive_files)
foreach(archive ${archives})
  list(APPEND archive_files $<TARGET_FILE:${archive}>)
endforeach()
# CUDA's runtime is an archive, and loads the driver only when it is used.
if(TESSERA_HAVE_CUDA)
  list(APPEND archive_files $<TARGET_FILE:CUDA::cudart_static>)
endif()

# ---- libtessera.so
option(TESSERA_STATIC_DEPENDENCIES
  "libtessera.so contains the libraries that it needs, as far as they are position independent" ON)

# It has no code but what the archives have.
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/libtessera.cc CONTENT "")
add_library(tessera_shared SHARED ${CMAKE_CURRENT_BINARY_DIR}/libtessera.cc)
add_library(Tessera::c ALIAS tessera_shared)
set_target_properties(tessera_shared PROPERTIES
  OUTPUT_NAME tessera VERSION ${PROJECT_VERSION} SOVERSION 2
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/api/libtessera.map)
target_include_directories(tessera_shared INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/include)
target_link_options(tessera_shared PRIVATE
  -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/api/libtessera.map -Wl,--as-needed)
if(TESSERA_STATIC_DEPENDENCIES AND NOT TESSERA_SANITIZE)
  include(${PROJECT_SOURCE_DIR}/deploy/cmake/static_dependencies.cmake)
  tessera_split_dependencies(gRPC::grpc++ contained linked)
  add_dependencies(tessera_shared tessera_client ${archives})
  set_property(TARGET tessera_shared APPEND PROPERTY LINK_DEPENDS
    $<TARGET_FILE:tessera_client> ${archive_files})
  target_link_libraries(tessera_shared PRIVATE
    -Wl,--whole-archive $<TARGET_FILE:tessera_client> -Wl,--no-whole-archive
    -Wl,--start-group ${archive_files} ${contained} -Wl,--end-group
    ${linked} absl::status absl::statusor absl::cord Threads::Threads
    ${CMAKE_DL_LIBS} rt m)
  target_link_options(tessera_shared PRIVATE -Wl,-z,defs)
  # Other C++ libraries bring the shared one, and a process should have one of it.
  if(NOT linked)
    target_link_options(tessera_shared PRIVATE -static-libstdc++ -static-libgcc)
  endif()
else()
  target_link_libraries(tessera_shared PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,tessera_client>)
endif()

# tessera_merge(NAME FILES...): one archive with the members of others.
function(tessera_merge name)
  set(merged ${PROJECT_BINARY_DIR}/lib/${name}.a)
  set(script "CREATE ${merged}\n")
  foreach(file ${ARGN})
    string(APPEND script "ADDLIB ${file}\n")
  endforeach()
  string(APPEND script "SAVE\nEND\n")
  file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.mri CONTENT "${script}")
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  add_custom_command(
    OUTPUT ${merged}
    COMMAND ${CMAKE_COMMAND} -E rm -f ${merged}
    COMMAND sh -c "\"$1\" -M < \"$2\"" merge ${CMAKE_AR} ${CMAKE_CURRENT_BINARY_DIR}/${name}.mri
    DEPENDS tessera_client ${archives} ${CMAKE_CURRENT_BINARY_DIR}/${name}.mri
    COMMENT "Merging ${name}.a"
    VERBATIM)
  add_custom_target(${name}_archive ALL DEPENDS ${merged})
endfunction()

# For C++; its users link gRPC, protobuf and Abseil themselves.
tessera_merge(libtessera-client $<TARGET_FILE:tessera_client> ${archive_files})

# For C, with everything: a program that links it needs the C and C++ runtimes and nothing else.
if(NOT TESSERA_SANITIZE)
  include(${PROJECT_SOURCE_DIR}/deploy/cmake/static_dependencies.cmake)
  tessera_archives_of(gRPC::grpc++ dependencies)
  if(dependencies)
    tessera_merge(libtessera $<TARGET_FILE:tessera_client> ${archive_files} ${dependencies})
  endif()
endif()
