# What `cmake --install` copies, by component:
#
#   daemon   tesserad, with its manual page and completion
#   service  its systemd unit, user, folder and /etc/tessera/tesserad.json, for the prefix /usr;
#            only if asked for
#   client   tessera (the command), with its manual page and completion
#   library  libtessera.so.2
#   dev      public headers, libtessera.a (C), libtessera-client.a (C++), CMake package, pkg-config
#
# deploy/packaging/packages.cmake makes Debian packages of them.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS tesserad RUNTIME COMPONENT daemon)
install(TARGETS tessera RUNTIME COMPONENT client)
install(TARGETS tessera_shared
  LIBRARY COMPONENT library NAMELINK_COMPONENT dev)
set(documents ${PROJECT_BINARY_DIR}/documents)
install(FILES ${documents}/tesserad.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8 COMPONENT daemon)
install(FILES ${documents}/tessera.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT client)
foreach(pair tesserad:daemon tessera:client)
  string(REPLACE ":" ";" pair ${pair})
  list(GET pair 0 command)
  list(GET pair 1 component)
  install(FILES ${documents}/${command}.bash RENAME ${command}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT ${component})
endforeach()
install(DIRECTORY client/include/tessera TYPE INCLUDE COMPONENT dev FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/lib/libtessera-client.a
  DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
install(FILES ${PROJECT_BINARY_DIR}/lib/libtessera.a
  DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev OPTIONAL)

# ---- find_package(Tessera)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
set(TESSERA_CLIENT_SYSTEM_LIBRARIES "${CMAKE_DL_LIBS};rt;m")
configure_package_config_file(deploy/cmake/TesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
  INSTALL_DESTINATION ${package_folder}
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
              ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  DESTINATION ${package_folder} COMPONENT dev)

# ---- pkg-config. Paths follow from the place of the .pc file: a prefix may be moved.
file(RELATIVE_PATH TESSERA_PC_TO_PREFIX
  /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
foreach(name tessera tessera-client)
  configure_file(deploy/cmake/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)
endforeach()

# ---- The service. Its paths are those of a system, whatever the prefix of the rest.
function(tessera_install_service file destination name)
  install(FILES ${file} DESTINATION ${destination} RENAME ${name}
    COMPONENT service EXCLUDE_FROM_ALL)
endfunction()
tessera_install_service(deploy/systemd/tesserad.service lib/systemd/system tesserad.service)
# The unit of a node with several daemons: one per configuration file.
file(READ deploy/systemd/tesserad.service unit)
string(REPLACE "KV-cache daemon" "KV-cache daemon %i" unit "${unit}")
string(REPLACE "/etc/tessera/tesserad.json" "/etc/tessera/%i.json" unit "${unit}")
string(REPLACE "# Workers' containers mount this folder: it has to be the same one after a restart."
  "# All daemons of the node use this folder, so none of them removes it." unit "${unit}")
string(REPLACE "RuntimeDirectoryPreserve=restart" "RuntimeDirectoryPreserve=yes" unit "${unit}")
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/tesserad@.service CONTENT "${unit}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS deploy/systemd/tesserad.service)
tessera_install_service(${PROJECT_BINARY_DIR}/tesserad@.service lib/systemd/system
  tesserad@.service)
tessera_install_service(deploy/systemd/sysusers.conf lib/sysusers.d tessera.conf)
tessera_install_service(deploy/systemd/tmpfiles.conf lib/tmpfiles.d tessera.conf)
tessera_install_service(deploy/packaging/tesserad.json /etc/tessera tesserad.json)
if(TESSERA_HAVE_CUDA)
  foreach(unit tesserad tesserad@)
    tessera_install_service(deploy/systemd/cuda.conf lib/systemd/system/${unit}.service.d cuda.conf)
  endforeach()
endif()

# ---- What images and packages have to know of the build.
set(cuda_version)
if(TESSERA_HAVE_CUDA)
  set(cuda_version ${CUDAToolkit_VERSION})
endif()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/facts.json
  CONTENT "{\"version\": \"@PROJECT_VERSION@\", \"cuda\": \"@cuda_version@\"}\n" @ONLY)
include(deploy/packaging/packages.cmake)
