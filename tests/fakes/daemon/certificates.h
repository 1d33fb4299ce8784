// Generates certificates at run time, so that no committed test certificate can expire.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace tessera::fakes {

// Both in PEM.
struct KeyPair {
  std::string certificate;
  std::string key;
};

class CertificateAuthority {
 public:
  explicit CertificateAuthority(const std::string& name);

  const std::string& certificate() const { return certificate_; }
  // Issues a certificate for a host name, an IP address or a client. Valid for one hour.
  KeyPair Issue(const std::string& name);

 private:
  using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
  using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

  static Key NewKey();
  // Signed with `issuer_key`. Self-signed if `issuer` is null.
  static Certificate Sign(const std::string& name, EVP_PKEY* key, X509* issuer,
                          EVP_PKEY* issuer_key, long serial);

  Key key_;
  Certificate own_;
  std::string certificate_;
  long serial_ = 1;
};

}  // namespace tessera::fakes
