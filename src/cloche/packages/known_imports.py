"""Which package provides an import: the table of certain cases. Data alone.

A row is here because the project itself documents it: an import, its package, then other packages that provide the same
import. Imports without a row are not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

# Imports whose package has another name. "import: package other-packages".
_OTHER_NAMES = """
absl: absl-py
adjustText: adjustText
attr: attrs
Bio: biopython
bs4: beautifulsoup4
cairosvg: CairoSVG
catboost: catboost
certifi: certifi
Crypto: pycryptodome
Cryptodome: pycryptodomex
cv2: opencv-python-headless opencv-python opencv-contrib-python opencv-contrib-python-headless
Cython: Cython
dateutil: python-dateutil
dns: dnspython
docx: python-docx
dotenv: python-dotenv
faiss: faiss-cpu
fitz: pymupdf
flask_cors: flask-cors
flask_login: flask-login
flask_migrate: flask-migrate
flask_sqlalchemy: flask-sqlalchemy
fontTools: fonttools
fpdf: fpdf2 fpdf
gi: PyGObject
git: GitPython
github: PyGithub
google.auth: google-auth
google.cloud.bigquery: google-cloud-bigquery
google.cloud.firestore: google-cloud-firestore
google.cloud.pubsub: google-cloud-pubsub
google.cloud.storage: google-cloud-storage
google.genai: google-genai
google.generativeai: google-generativeai
google.oauth2: google-auth
google.protobuf: protobuf
googleapiclient: google-api-python-client
graphql: graphql-core
grpc: grpcio
gym: gym
haystack: haystack-ai
igraph: igraph python-igraph
imblearn: imbalanced-learn
IPython: ipython
ipywidgets: ipywidgets
jenkins: python-jenkins
jose: python-jose
jsonpath_ng: jsonpath-ng
jwt: PyJWT
kafka: kafka-python
kubernetes: kubernetes
langchain_anthropic: langchain-anthropic
langchain_community: langchain-community
langchain_core: langchain-core
langchain_openai: langchain-openai
langchain_text_splitters: langchain-text-splitters
ldap: python-ldap
Levenshtein: Levenshtein python-Levenshtein
lightning: lightning
llama_index: llama-index
magic: python-magic
markdown: Markdown
markdown_it: markdown-it-py
memcache: python-memcached
mpl_toolkits: matplotlib
mysql: mysql-connector-python
MySQLdb: mysqlclient
nacl: PyNaCl
odf: odfpy
OpenGL: PyOpenGL
OpenSSL: pyOpenSSL
opentelemetry: opentelemetry-api
pdfminer: pdfminer.six
PIL: pillow
pkg_resources: setuptools
pptx: python-pptx
prometheus_client: prometheus-client
psycopg2: psycopg2-binary psycopg2
psycopg: psycopg[binary]
pyarrow: pyarrow
pydantic_settings: pydantic-settings
pylab: matplotlib
pymupdf: pymupdf
pypandoc: pypandoc
pytesseract: pytesseract
pytest_asyncio: pytest-asyncio
pytest_mock: pytest-mock
pythonjsonlogger: python-json-logger
pywt: PyWavelets
rapidjson: python-rapidjson
rdflib: rdflib
requests_oauthlib: requests-oauthlib
requests_toolbelt: requests-toolbelt
rest_framework: djangorestframework
rpds: rpds-py
ruamel.yaml: ruamel.yaml
sacrebleu: sacrebleu
sentence_transformers: sentence-transformers
sentry_sdk: sentry-sdk
serial: pyserial
shapely: shapely
skimage: scikit-image
sklearn: scikit-learn
slack_sdk: slack-sdk
slugify: python-slugify
smbus2: smbus2
snowflake.connector: snowflake-connector-python
socks: PySocks
sounddevice: sounddevice
speech_recognition: SpeechRecognition
sqlalchemy_utils: SQLAlchemy-Utils
telegram: python-telegram-bot
tensorboard: tensorboard
text_unidecode: text-unidecode
tiktoken: tiktoken
tlz: toolz
umap: umap-learn
usaddress: usaddress
usb: pyusb
vcr: vcrpy
vobject: vobject
websocket: websocket-client
wordcloud: wordcloud
wx: wxPython
xlsxwriter: XlsxWriter
yaml: PyYAML
youtube_dl: youtube_dl
yt_dlp: yt-dlp
zmq: pyzmq
"""

# Imports whose package has the same name, as everybody knows it: packages that are old, and widely used.
_SAME_NAMES = """
accelerate aioboto3 aiobotocore aiofiles aiohttp aiosqlite alembic altair annotated_types anthropic anyio appdirs
arrow asgiref astor astroid astropy asyncpg authlib autograd babel backoff bcrypt black bleach blinker blosc bokeh
boto3 botocore bottle bottleneck brotli cachetools cartopy cattrs celery cerberus cffi chardet charset_normalizer
chromadb click cloudpickle cohere colorama coloredlogs contourpy coverage crewai cryptography cssselect cycler dash
dask dataclasses_json datasets dateparser deap deepdiff defusedxml deprecated diffusers dill diskcache distro django
docker docutils duckdb ecdsa einops elasticsearch emoji et_xmlfile evaluate faker fastapi fastavro fastparquet
feedparser filelock fiona flake8 flask flax folium frozendict fsspec ftfy fuzzywuzzy gensim geopandas geopy gevent
gradio graphene graphviz greenlet gunicorn h11 h2 h3 h5py holidays holoviews html2text html5lib httpcore httplib2
httptools httpx httpx_sse huggingface_hub humanize hypothesis idna ijson imageio inflect iniconfig invoke isodate
isort itsdangerous jax jedi jellyfish jinja2 jiter jmespath joblib json5 jsonpickle jsonpointer jsonschema keras
kiwisolver langchain langdetect langgraph langsmith lark librosa lightgbm litellm llvmlite locust loguru lxml lz4 mako
markdownify markupsafe marshmallow matplotlib mdurl missingno mistralai mlflow mock more_itertools moto mpmath msgpack
msgspec multidict mypy natsort nbformat nest_asyncio networkx nibabel nltk notebook nox numba numexpr numpy oauthlib
ollama onnx onnxruntime openai openpyxl opt_einsum optuna orjson outlines packaging pandas pandera papermill
parameterized paramiko parse parsel parso partd passlib pathspec patsy pdfplumber peewee pendulum pexpect phonenumbers
pika plotly plotnine pluggy polars portalocker pre_commit prettytable prompt_toolkit propcache prophet psutil
pulp pyasn1 pycountry pydantic pydantic_ai pydantic_core pydot pydub pygame pygments pylint pymongo pymysql pyparsing
pypdf pyperclip pyproj pytest pytz pyvis qdrant_client qrcode rapidfuzz rasterio ray redis referencing regex reportlab
requests responses respx retrying rich ruff s3fs sacremoses safetensors scapy scipy scrapy seaborn selenium
sentencepiece setproctitle setuptools shap simplejson simpy six sniffio sortedcontainers soupsieve spacy sphinx
sqlalchemy sqlglot sqlmodel sqlparse starlette statsmodels stripe structlog svgwrite sympy tabulate tblib tenacity
tensorflow termcolor textblob textual tifffile tinydb tokenizers toml tomli tomli_w tomlkit toolz torch torchaudio
torchvision tornado tqdm traitlets transformers trio twilio twine typeguard typer typing_extensions typing_inspection
tzdata tzlocal ujson unidecode uritemplate urllib3 uvicorn uvloop validators virtualenv wandb watchdog watchfiles
wcwidth webcolors websockets werkzeug wheel wrapt wsproto xarray xgboost xlrd xmltodict xxhash yarl zarr zict zipp
zstandard
"""


def _normalized(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def _table() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {name: (_normalized(name),) for name in _SAME_NAMES.split()}
    for line in _OTHER_NAMES.strip().splitlines():
        name, _, packages = line.partition(": ")
        table[name] = tuple(map(_normalized, packages.split()))
    return table


DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = _table()
