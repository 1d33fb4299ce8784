#include "tests/fakes/daemon/certificates.h"

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include "daemon/base/check.h"

namespace tessera::fakes {

namespace {

constexpr long kValidSeconds = 3600;

void Must(bool done) { TESSERA_CHECK(done, "OpenSSL makes no certificate"); }

std::string Pem(const auto& write) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> memory(BIO_new(BIO_s_mem()), &BIO_free);
  Must(memory != nullptr && write(memory.get()) == 1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(memory.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

void Extend(X509* certificate, X509* issuer, int what, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, what, value.c_str());
  Must(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

}  // namespace

CertificateAuthority::Key CertificateAuthority::NewKey() {
  Key key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  Must(key != nullptr);
  return key;
}

CertificateAuthority::Certificate CertificateAuthority::Sign(const std::string& name, EVP_PKEY* key,
                                                             X509* issuer, EVP_PKEY* issuer_key,
                                                             long serial) {
  Certificate certificate(X509_new(), &X509_free);
  Must(certificate != nullptr && X509_set_version(certificate.get(), X509_VERSION_3) == 1);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -kValidSeconds);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), kValidSeconds);
  X509_NAME* const subject = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509* const signer = issuer == nullptr ? certificate.get() : issuer;
  Must(X509_set_issuer_name(certificate.get(), X509_get_subject_name(signer)) == 1);
  Must(X509_set_pubkey(certificate.get(), key) == 1);
  if (issuer == nullptr) {
    Extend(certificate.get(), signer, NID_basic_constraints, "critical,CA:TRUE");
  } else {
    const bool is_ip = name.find_first_not_of("0123456789.") == std::string::npos;
    Extend(certificate.get(), signer, NID_subject_alt_name, (is_ip ? "IP:" : "DNS:") + name);
  }
  Must(X509_sign(certificate.get(), issuer_key, EVP_sha256()) > 0);
  return certificate;
}

CertificateAuthority::CertificateAuthority(const std::string& name)
    : key_(NewKey()),
      own_(Sign(name, key_.get(), nullptr, key_.get(), serial_)),
      certificate_(Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, own_.get()); })) {}

KeyPair CertificateAuthority::Issue(const std::string& name) {
  const Key key = NewKey();
  const Certificate certificate = Sign(name, key.get(), own_.get(), key_.get(), ++serial_);
  return {.certificate = Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate.get()); }),
          .key = Pem([&](BIO* bio) {
            return PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
          })};
}

}  // namespace tessera::fakes
