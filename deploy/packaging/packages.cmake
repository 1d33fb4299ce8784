# Debian packages, one per group of install components: `deploy/packaging/build` runs CPack.
#
#   tesserad         daemon, service
#   tessera          client
#   libtessera2      library
#   libtessera-dev   dev

set(TESSERA_PACKAGE_CONTACT "Tessera maintainers <maintainers@tessera.invalid>" CACHE STRING
  "Who maintains the Debian packages: name <address>")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_CONTACT ${TESSERA_PACKAGE_CONTACT})
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL daemon service client library dev)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)

# tessera_package(NAME SUMMARY SECTION COMPONENTS...): the licence is part of each package.
function(tessera_package name summary section)
  string(TOUPPER ${name} upper)
  foreach(component ${ARGN})
    string(TOUPPER ${component} component_upper)
    set(CPACK_COMPONENT_${component_upper}_GROUP ${name} PARENT_SCOPE)
  endforeach()
  list(GET ARGN 0 first)
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} RENAME copyright
    COMPONENT ${first})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION ${summary} PARENT_SCOPE)
endfunction()
tessera_package(tesserad "KV-cache manager daemon for LLM inference" net daemon service)
tessera_package(tessera "Command line of the KV-cache manager tesserad" utils client)
tessera_package(libtessera2 "Client library of the KV-cache manager tesserad, for C" libs library)
tessera_package(libtessera-dev "Headers and archives of tesserad's client library" libdevel dev)

set(scripts ${PROJECT_SOURCE_DIR}/deploy/packaging)
set(CPACK_DEBIAN_TESSERAD_PACKAGE_CONTROL_EXTRA
  ${scripts}/postinst ${scripts}/prerm ${scripts}/postrm ${scripts}/conffiles)
set(CPACK_DEBIAN_TESSERAD_PACKAGE_DEPENDS
  "procps, systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
set(CPACK_DEBIAN_TESSERAD_PACKAGE_SUGGESTS tessera)
set(CPACK_DEBIAN_LIBTESSERA2_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_LIBTESSERA-DEV_PACKAGE_DEPENDS "libtessera2 (= ${PROJECT_VERSION}-1)")
# What the C++ interface is linked with; the C interface needs none of them.
set(CPACK_DEBIAN_LIBTESSERA-DEV_PACKAGE_RECOMMENDS
  "libgrpc++-dev, libprotobuf-dev, libabsl-dev, pkg-config")
include(CPack)
