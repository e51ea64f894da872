// For tests: generates authorities and certificates.
#ifndef RINGATTN_COMMON_SECURITY_TEST_CERTIFICATES_H_
#define RINGATTN_COMMON_SECURITY_TEST_CERTIFICATES_H_

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "gtest/gtest.h"

namespace ringattn {

struct TestCertificate {
  std::string certificate;  // PEM
  std::string key;          // PEM
};

// An authority for 127.0.0.1 and localhost. Not thread safe.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name) : name_(name), key_(NewKey()) {
    pem_ = Make(name, key_.get(), -3600, 86400, "", true);
  }

  const std::string& pem() const { return pem_; }

  // Valid from `from` until `until`, in seconds relative to the current time.
  TestCertificate Issue(const std::string& name, long from = -3600, long until = 86400,
                        const std::string& san = "DNS:localhost,IP:127.0.0.1") const {
    const Key key = NewKey();
    return {Make(name, key.get(), from, until, san, false), PemOfKey(key.get())};
  }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(BIO* bio) const { BIO_free(bio); }
  };
  using Key = std::unique_ptr<EVP_PKEY, Free>;

  static Key NewKey() { return Key(EVP_EC_gen("P-256")); }

  template <typename Write>
  static std::string Pem(const Write& write) {
    const std::unique_ptr<BIO, Free> bio(BIO_new(BIO_s_mem()));
    EXPECT_EQ(write(bio.get()), 1);
    std::string text(BIO_ctrl_pending(bio.get()), '\0');
    BIO_read(bio.get(), text.data(), static_cast<int>(text.size()));
    return text;
  }
  static std::string PemOfKey(EVP_PKEY* key) {
    return Pem([&](BIO* bio) {
      return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
    });
  }

  std::string Make(const std::string& name, EVP_PKEY* key, long from, long until,
                   const std::string& san, bool is_authority) const {
    const std::unique_ptr<X509, Free> made(X509_new());
    X509_set_version(made.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made.get()), ++serial_);
    X509_gmtime_adj(X509_getm_notBefore(made.get()), from);
    X509_gmtime_adj(X509_getm_notAfter(made.get()), until);
    SetName(X509_get_subject_name(made.get()), name);
    SetName(X509_get_issuer_name(made.get()), name_);
    X509_set_pubkey(made.get(), key);
    if (is_authority) Extend(made.get(), NID_basic_constraints, "critical,CA:TRUE");
    if (!san.empty()) Extend(made.get(), NID_subject_alt_name, san);
    EXPECT_GT(X509_sign(made.get(), key_.get(), EVP_sha256()), 0);
    return Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, made.get()); });
  }

  static void SetName(X509_NAME* name, const std::string& text) {
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(text.c_str()), -1, -1, 0);
  }
  static void Extend(X509* certificate, int nid, const std::string& value) {
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, nid, value.c_str());
    ASSERT_NE(extension, nullptr);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }

  inline static long serial_ = 0;
  const std::string name_;
  const Key key_;
  std::string pem_;
};

// Moves the file into place in the test's folder and returns its path.
inline std::string PutFile(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + "/" +
                           testing::UnitTest::GetInstance()->current_test_info()->name() + "-" +
                           name;
  std::ofstream(path + ".new") << text;
  EXPECT_EQ(std::rename((path + ".new").c_str(), path.c_str()), 0);
  return path;
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TEST_CERTIFICATES_H_
