// Certificates made on the spot: tests keep none that expire.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace tessera::fakes {

// PEM.
struct KeyPair {
  std::string certificate;
  std::string key;
};

class CertificateAuthority {
 public:
  explicit CertificateAuthority(const std::string& name);

  const std::string& certificate() const { return certificate_; }
  // For a host's name or IP address, or a caller; valid for an hour.
  KeyPair Issue(const std::string& name);

 private:
  using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
  using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

  static Key NewKey();
  // Signed by `issuer_key`; of itself where `issuer` is null.
  static Certificate Sign(const std::string& name, EVP_PKEY* key, X509* issuer,
                          EVP_PKEY* issuer_key, long serial);

  Key key_;
  Certificate own_;
  std::string certificate_;
  long serial_ = 1;
};

}  // namespace tessera::fakes
