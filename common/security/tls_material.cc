#include "common/security/tls_material.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;

// Closes a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Bio = std::unique_ptr<BIO, Free>;
using Certificate = std::unique_ptr<X509, Free>;
using Key = std::unique_ptr<EVP_PKEY, Free>;

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// A key with a pass phrase counts as unreadable; nobody is prompted.
int NoPassPhrase(char*, int, int, void*) { return -1; }

// Returns all certificates up to the first unreadable one.
std::vector<Certificate> Certificates(const std::string& pem, bool* broken) {
  std::vector<Certificate> certificates;
  const Bio bio = Open(pem);
  ERR_clear_error();
  while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, NoPassPhrase, nullptr)) {
    certificates.emplace_back(next);
  }
  // "No start line" is the end of the file; any other error is a damaged block.
  *broken = ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE;
  ERR_clear_error();
  return certificates;
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

absl::Status Bad(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", why));
}

absl::StatusOr<std::vector<Certificate>> ReadCertificates(const std::string& path,
                                                          const std::string& pem) {
  bool broken = false;
  std::vector<Certificate> certificates = Certificates(pem, &broken);
  if (broken) return Bad(path, "a certificate in it is damaged");
  if (certificates.empty()) return Bad(path, "it holds no certificate in PEM");
  return certificates;
}

absl::Status ReadIdentity(const TlsFiles& files, absl::Time now, TlsMaterial* material) {
  absl::StatusOr<std::string> chain = ReadWholeFile(files.certificate, "the certificate");
  if (!chain.ok()) return chain.status();
  absl::StatusOr<std::string> key_pem = ReadWholeFile(files.key, "the key");
  if (!key_pem.ok()) return key_pem.status();
  const auto certificates = ReadCertificates(files.certificate, *chain);
  if (!certificates.ok()) return certificates.status();
  const Key key(PEM_read_bio_PrivateKey(Open(*key_pem).get(), nullptr, NoPassPhrase, nullptr));
  ERR_clear_error();
  if (key == nullptr) return Bad(files.key, "it holds no key in PEM without a pass phrase");
  if (X509_check_private_key(certificates->front().get(), key.get()) != 1) {
    ERR_clear_error();
    return Bad(files.key, absl::StrCat("it is not the key of ", files.certificate));
  }
  for (const Certificate& certificate : *certificates) {
    const absl::Time from = ToTime(X509_get0_notBefore(certificate.get()));
    const absl::Time until = ToTime(X509_get0_notAfter(certificate.get()));
    if (until <= now) {
      return Bad(files.certificate, absl::StrCat("it expired at ", absl::FormatTime(until)));
    }
    if (from > now) {
      return Bad(files.certificate,
                 absl::StrCat("it is not valid before ", absl::FormatTime(from)));
    }
    material->expires = std::min(material->expires, until);
  }
  material->identity_pem = absl::StrCat(*key_pem, "\n", *chain);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, absl::string_view what) {
  // Without O_NONBLOCK, opening a FIFO waits for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about {};
  if (file.get() < 0 || fstat(file.get(), &about) != 0) {
    return Bad(path, absl::StrCat("cannot read ", what));
  }
  if (!S_ISREG(about.st_mode)) {
    return Bad(path, absl::StrCat("cannot read ", what, ": it is not a regular file"));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  size_t bytes = 0;
  while (bytes < text.size()) {
    const ssize_t got = read(file.get(), text.data() + bytes, text.size() - bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Bad(path, absl::StrCat("cannot read ", what));
    if (got == 0) break;
    bytes += static_cast<size_t>(got);
  }
  text.resize(bytes);
  if (text.size() > kMaxFileBytes) return Bad(path, absl::StrCat(what, " has over 1 MiB"));
  return text;
}

absl::StatusOr<TlsMaterial> ReadTlsFiles(const TlsFiles& files, absl::Time now) {
  TlsMaterial material;
  if (!files.certificate.empty()) {
    if (absl::Status status = ReadIdentity(files, now, &material); !status.ok()) return status;
  }
  if (!files.authorities.empty()) {
    absl::StatusOr<std::string> pem = ReadWholeFile(files.authorities, "the authorities");
    if (!pem.ok()) return pem.status();
    const auto authorities = ReadCertificates(files.authorities, *pem);
    if (!authorities.ok()) return authorities.status();
    material.authorities_pem = *std::move(pem);
  }
  return material;
}

}  // namespace ringattn
